"""Pictures of a record: their bytes once per content, shared by all steps and ranks."""
