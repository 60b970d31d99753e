"""Datasets: reading and tokenising rows, and the order in which ranks train on them."""

from areal_core.data.loader import PromptLoader
from areal_core.data.read import arithmetic_rows, get_dataset, rows_of

__all__ = ["PromptLoader", "arithmetic_rows", "get_dataset", "rows_of"]
