"""Records made of recorded steps: read as they were written, and without secrets."""
