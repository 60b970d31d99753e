"""Records as other tools read them: one file a format."""
