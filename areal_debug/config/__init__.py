"""`areal-debug config`: every option of a run, with its type, default, limits and help."""
