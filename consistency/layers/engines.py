"""Engines in this process: Transformers itself, and the embedded engine."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from areal_core.embedded.replica import Replica
from areal_core.engine.model import load_model, own_attention, set_attention
from consistency.layers.observed import Observed, Rows, observe, own_forward

PROMPT_SHARE = 0.5  # of a row; the engine decodes the rest token by token


def transformers(path: str | Path, dtype: torch.dtype, rows: Rows) -> Observed:
    """Run rows through the model's own class, with the attention that the class defines."""
    model = load_model(str(path), dtype=dtype, attn_implementation="sdpa").eval()
    set_attention(model, own_attention(model))
    return observe(f"Transformers with {path}", model, own_forward(model), rows)


def embedded(path: str | Path, dtype: torch.dtype, rows: Rows) -> Observed:
    """Run rows through the embedded engine: half as a prompt, the rest token by token."""
    replica = Replica(str(path), dtype, torch.device("cpu"))

    def forward(tokens: Tensor, start: int, cache: DynamicCache) -> Any:
        end = start + tokens.shape[1]
        return replica(tokens, torch.ones(1, end, dtype=torch.int64), torch.arange(start, end)[None], cache)

    return observe(f"the embedded engine with {path}", replica.model, forward, rows, prefill=PROMPT_SHARE)
