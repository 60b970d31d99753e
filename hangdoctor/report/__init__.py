"""Diagnoses as text for people: pure functions from a diagnosis to a string."""
