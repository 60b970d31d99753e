"""The values of an engine's operators on rows of tokens, and a Transformers model as engine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from areal_core.engine.model import cache_argument
from consistency.layers.hooks import tapped
from consistency.layers.rows import Row, Rows, image_options
from consistency.layers.sites import Site

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
