"""Samples of steps as columns: the one reader of them, Arrow tables, and files of other tools."""
