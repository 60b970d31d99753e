"""Where prompts come from, and in which order ranks see them."""

from areal_core.dataset.loader import PromptLoader
from areal_core.dataset.sources import arithmetic_rows, get_dataset

__all__ = ["PromptLoader", "arithmetic_rows", "get_dataset"]
