"""SGLang servers of a run: start and discover them, sample tokens, update and verify weights."""
