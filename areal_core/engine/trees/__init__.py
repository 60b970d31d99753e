"""Rows that begin with the same tokens, computed as a tree of tokens."""
