"""`areal-debug train --dry-run`: what a run would do and need, before anything starts."""
