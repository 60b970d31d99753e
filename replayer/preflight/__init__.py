"""Check that a run is deterministic before it starts: its settings, its code, real steps of it."""
