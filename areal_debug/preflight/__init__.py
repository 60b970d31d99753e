"""`areal-debug preflight`: check before a run that it is deterministic."""
