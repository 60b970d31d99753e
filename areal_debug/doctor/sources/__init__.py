"""Readers of metrics, one file a format; each yields rows of a step and its numbers by name."""
