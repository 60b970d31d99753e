"""The reference model's operators, each fed with what the engine computed before it."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from areal_core.engine.model import attention_of, own_attention, set_attention
from consistency.layers.hooks import tapped
from consistency.layers.observed import RowValues, own_forward, pieces
from consistency.layers.rows import Row
from consistency.layers.sites import Site

Results = dict[Site, Tensor]  # [tokens, width]


@dataclass(frozen=True)
class Reference:
    """A model in the engine's dtype, and the same weights where rounding does not matter."""

    model: Any
    exact: Any

    @property
    def arrangements(self) -> "list[Callable[[Row, RowValues | None], Results]]":
        """Ways to compute the same, which differ in rounding: the engine's dtype, with another
        attention in two pieces through the cache, and with rope frequencies one ulp away."""

        def plain(row: Row, given: RowValues | None) -> Results:
            return run(self.model, row, given)

        def other_kernels(row: Row, given: RowValues | None) -> Results:
            with attention_of(self.model, "eager"):
                return run(self.model, row, given, prefill=0.5)

        def other_frequencies(row: Row, given: RowValues | None) -> Results:
            with moved_buffers(self.exact):
                return run(self.exact, row, given)

        return [plain, other_kernels, other_frequencies]


def reference_of(model: Any) -> Reference:
    """Make a reference of a Transformers model in the engine's dtype."""
    set_attention(model, own_attention(model))
    model = model.eval().requires_grad_(False)
    wider = torch.float64 if model.dtype == torch.float32 else torch.float32
    exact = copy.deepcopy(model).to(wider)
    exact.set_experts_implementation("eager")  # the grouped kernels have no float64
    return Reference(model, exact)


@torch.no_grad()
def run(model: Any, row: Row, given: RowValues | None, *, prefill: float = 1.0) -> Results:
    """Return the result of every operator for a row.

    Args:
        given: the engine's values: each operator computes with them, where the engine has any. None
            lets the model compute on its own.
        prefill: share of the row before the last piece, which reads the cache.
    """
    results: dict[Site, list[Tensor]] = {}
    forward, cache = own_forward(model), DynamicCache()

    def exchange(site: Site, value: Tensor) -> Tensor:
        results.setdefault(site, []).append(value)
        if given is None or site not in given.values:
            return value
        engine, seen = (values[site][taps.start : taps.end] for values in (given.values, given.seen))
        if engine.shape != value.shape:
            return value
        return torch.where(seen[:, None], engine.to(value.dtype), value)

    with tapped(model, exchange) as taps:
        for taps.start, taps.end in pieces(len(row.ids), prefill, len(row.ids), row.end_of_images):
            forward(row, taps.start, taps.end, cache)
    joined = {site: torch.cat(values) for site, values in results.items()}
    # Pixels belong to the first piece alone.
    return {site: pad(values, (0, 0, 0, len(row.ids) - len(values))) for site, values in joined.items()}


@contextmanager
def moved_buffers(model: Any) -> Iterator[None]:
    tables = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    before = [table.clone() for table in tables]
    for table in tables:
        table.mul_(1 + 2.0**-23)
    try:
        yield
    finally:
        for table, value in zip(tables, before, strict=True):
            table.copy_(value)
