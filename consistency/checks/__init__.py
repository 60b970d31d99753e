"""Checks of a comparison: one function for each cause of `causes.toml`."""
