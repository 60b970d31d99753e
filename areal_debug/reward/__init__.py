"""`areal-debug reward`: what a reward function pays for, and where two of them disagree."""
