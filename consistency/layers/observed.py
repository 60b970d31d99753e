"""Rows of tokens that engine and reference both compute, and the inputs of their images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from areal_core.data.processor import VisionProcessor, load_processor
from areal_core.embedded.replica import Replica
from areal_core.engine.model import cache_argument, load_model, own_attention, set_attention
from areal_core.engine.vision_models import plain_inputs
from consistency.alternatives.images import placeholder_counts, runs_of
from consistency.errors import NothingToCompare
from consistency.layers.hooks import Site, tapped


@dataclass(frozen=True)
class Row:
    """Ids of a prompt and its completion; `images` are encoded, their placeholders expanded.

    `image_token_id` is that placeholder, which no token of the completion is; -1 of a text model.
    """

    ids: list[int]
    images: tuple[bytes, ...] = ()
    image_token_id: int = -1

    @property
    def end_of_images(self) -> int:
        """Number of tokens up to the last placeholder; 0 without images."""
        if not self.images:
            return 0
        return len(self.ids) - self.ids[::-1].index(self.image_token_id)


Rows = Sequence[Row]


def image_options(model: Any, tokens: Tensor, row: Row) -> dict[str, Tensor]:
    """Return the options of the class's forward for the images of a row, besides `input_ids`.

    `tokens`, int64 [1, t], are the first ones of the row, with all placeholders.

    Raises:
        NothingToCompare: the processor in the model's folder expands images otherwise.
    """
    processor = processor_for(model.name_or_path, row)
    types = (tokens[0] == processor.image_token_id).long()
    return plain_inputs(model, types, processor.pixels(row.images))


def processor_for(path: str, row: Row) -> VisionProcessor:
    """Load the processor of a folder. Raises as `image_options`."""
    processor = load_processor(path)
    (wanted,) = placeholder_counts(processor, (row.images,))
    given = tuple(end - begin for begin, end in runs_of(np.array(row.ids), processor.image_token_id))
    if given != wanted:
        raise NothingToCompare(
            f"a row has {list(given)} placeholders of its images and the processor of {path} makes {list(wanted)}: "
            "their size limits differ; leave out --layers, which names the limit"
        )
    return processor


# forward(row, start, end, cache) computes the tokens from start to end; its result is not used
Forward = Callable[[Row, int, int, DynamicCache], Any]


@dataclass
class RowValues:
    """What an engine computed for one row.

    `values` are [tokens, width], float or the engine's dtype; `seen` is bool [tokens], false where
    the engine computed nothing, as logits before the last token.
    """

    num_tokens: int
    values: dict[Site, Tensor] = field(default_factory=dict)
    seen: dict[Site, Tensor] = field(default_factory=dict)

    def put(self, site: Site, start: int, value: Tensor) -> None:
        """Store the value [n, width] of the tokens from `start`."""
        if site not in self.values:
            self.values[site] = value.new_zeros(self.num_tokens, value.shape[1])
            self.seen[site] = torch.zeros(self.num_tokens, dtype=torch.bool)
        self.values[site][start : start + len(value)] = value
        self.seen[site][start : start + len(value)] = True


@dataclass(frozen=True)
class Observed:
    """What an engine computed: its name, its dtype, and the values of each row."""

    name: str
    dtype: torch.dtype
    rows: list[RowValues]


def pieces(num_tokens: int, prefill: float, step: int, least: int = 1) -> list[tuple[int, int]]:
    """Return the (start, end) of the calls of a row: a share as prompt, then `step` at a time.

    The prompt has at least `least` tokens.
    """
    first = max(1, least, min(num_tokens, round(prefill * num_tokens)))
    starts = [0, *range(first, num_tokens, step), num_tokens]
    return list(pairwise(starts))


@torch.no_grad()
def observe(
    name: str, model: nn.Module, forward: Forward, rows: Rows, *, prefill: float = 1.0, step: int = 1
) -> Observed:
    """Run rows through a Transformers model, one by one, and keep the value of every site.

    Args:
        forward: how the engine calls the model.
        prefill, step: see `pieces`.
    """
    found: list[RowValues] = []

    def keep(site: Site, value: Tensor) -> Tensor:
        found[-1].put(site, taps.end - len(value), value.detach())
        return value

    with tapped(model, keep) as taps:
        for row in rows:
            found.append(RowValues(len(row.ids)))
            cache = DynamicCache()
            for taps.start, taps.end in pieces(len(row.ids), prefill, step, row.end_of_images):
                forward(row, taps.start, taps.end, cache)
    dtype = next(model.parameters()).dtype
    return Observed(name, dtype, found)


def own_forward(model: Any) -> Forward:
    """Return the model's own forward, with a cache.

    After images the class finds positions itself.
    """

    argument = cache_argument(type(model).forward)

    def forward(row: Row, start: int, end: int, cache: DynamicCache) -> None:
        tokens = torch.tensor([row.ids[start:end]])
        if not row.images:
            options = {"position_ids": torch.arange(start, end)[None]}
        else:
            options = {} if start else image_options(model, tokens, row)
        model(input_ids=tokens, use_cache=True, **{argument: cache}, **options)

    return forward


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
