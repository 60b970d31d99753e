"""Engines in this process: Transformers itself, and the embedded engine."""

from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from areal_core.embedded.replica import Replica
from areal_core.engine.model import load_model, own_attention, set_attention
from consistency.layers.observed import Observed, observe, own_forward
from consistency.layers.rows import Row, Rows, processor_for

PROMPT_SHARE = 0.5  # of a row; the engine decodes the rest token by token


def transformers(path: str | Path, dtype: torch.dtype, rows: Rows) -> Observed:
    """Run rows through the model's own class, with the attention that the class defines."""
    model = load_model(str(path), dtype=dtype, attn_implementation="sdpa").eval()
    set_attention(model, own_attention(model))
    return observe(f"Transformers with {path}", model, own_forward(model), rows)


def embedded(path: str | Path, dtype: torch.dtype, rows: Rows) -> Observed:
    """Run rows through the embedded engine: half as a prompt, the rest token by token.

    A prompt has all images of its row.
    """
    replica = Replica(str(path), dtype, torch.device("cpu"))
    offset = 0  # of positions: the images of a row take fewer than they have tokens

    def forward(row: Row, start: int, end: int, cache: DynamicCache) -> Any:
        nonlocal offset
        tokens, mask = torch.tensor([row.ids[start:end]]), torch.ones(1, end, dtype=torch.int64)
        if row.images and not start:
            replica.processor = processor_for(str(path), row)
            logits, offsets = replica.read_prompts(tokens, mask, [row.images], cache)
            offset = int(offsets[0])
            return logits
        offset = offset if row.images else 0
        return replica(tokens, mask, torch.arange(start, end)[None] + offset, cache)

    return observe(f"the embedded engine with {path}", replica.model, forward, rows, prefill=PROMPT_SHARE)
