"""`areal-debug check run`: check before a run that it is deterministic."""
