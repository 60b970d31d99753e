"""Inference engines over HTTP, asked for completions and for a second look at them: one file a dialect."""
