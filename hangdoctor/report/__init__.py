"""Diagnoses as text that people read: pure functions from a diagnosis to a string."""
