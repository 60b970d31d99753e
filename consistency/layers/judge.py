"""Gap against noise floor of every operator, and the first that computes something else."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from areal_core.engine.model import attention_of, own_attention, set_attention
from consistency.layers.hooks import Site, tapped
from consistency.layers.observed import Observed, Row, Rows, RowValues, own_forward, pieces
from consistency.tensors import with_values

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
            tables = [buffer for name, buffer in self.exact.named_buffers() if name.endswith("inv_freq")]
            with with_values([(table, table * (1 + 2.0**-23)) for table in tables]):
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

    Each operator computes with the engine's values, where `given` has any. `prefill` is the share of
    the row before the last piece, which reads the cache.
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


HALF_ULP = 12**-0.5  # rms of rounding to the nearest, in ulps
COPIES = ("cache_k", "cache_v")  # results that are not computed, so not rounded
LIMIT = 4.0  # gap over floor, of one token; docs/verbs/consistency.md has what sound engines reach


@dataclass(frozen=True)
class SiteReport:
    """One site: the largest values over tokens; `ratio` is the largest created / floor.

    All are root-mean-square sizes relative to the reference's result.

    Attributes:
        created: the engine's result against the reference's operator on the engine's own input.
        floor: how much that operator's result depends on dtype and arrangement.
        total: the engine's result against a run of the reference alone, and its floor.
    """

    site: Site
    operator: str
    num_tokens: int
    num_beyond: int
    created: float
    floor: float
    ratio: float
    total: float
    total_floor: float

    @property
    def is_created(self) -> bool:
        """The operator computes something else."""
        return self.ratio > LIMIT

    @property
    def is_inherited(self) -> bool:
        """The result differs by more than rounding, and the operator did not create it."""
        return not self.is_created and self.total > LIMIT * self.total_floor


@dataclass(frozen=True)
class LayersReport:
    """The sites that engine and reference both have, in the order of computation."""

    engine: str
    dtype: str
    num_rows: int
    num_tokens: int
    sites: tuple[SiteReport, ...]
    only_reference: tuple[str, ...]  # results of the reference that the engine does not show

    @property
    def first(self) -> SiteReport | None:
        """The first operator that creates a gap."""
        return next((site for site in self.sites if site.is_created), None)

    @property
    def verdict(self) -> str:
        """`healthy`, `mismatch`, or `inconclusive` where no operator was seen."""
        if not self.sites:
            return "inconclusive"
        return "mismatch" if self.first else "healthy"


def compare_layers(reference: Reference, engine: Observed, rows: Rows) -> LayersReport:
    """Compare the engine's values for `rows` with the reference's operators."""
    gaps: dict[Site, list[Tensor]] = {}  # of each row: the columns of `site_report`
    computed: set[Site] = set()
    for row, values in zip(rows, engine.rows, strict=True):
        exact = run(reference.exact, row, values)
        alone, rounded = run(reference.exact, row, None), run(reference.model, row, None)
        others = [arrangement(row, values) for arrangement in reference.arrangements]
        computed |= set(exact)
        ties = ambiguous_routing(exact, values.values)
        for site in sorted(set(exact) & set(values.values)):
            seen = values.seen[site]
            if site.result == "routing":
                seen = seen & ~ties[site.layer]
            stored_in = torch.float32 if site.result in COPIES else engine.dtype
            smallest = HALF_ULP * torch.finfo(stored_in).eps
            found = values.values[site]
            created = gap_and_floor(found, exact[site], [other[site] for other in others], smallest)
            total = gap_and_floor(found, alone[site], [rounded[site]], smallest)
            gaps.setdefault(site, []).append(torch.stack([*created, *total])[:, seen])
    sites = tuple(site_report(site, name, gaps[site]) for site, name in operators(computed, set(gaps)))
    unseen = tuple(dict.fromkeys(site.result for site in sorted(computed - set(gaps))))
    num_tokens = sum(len(row.ids) for row in rows)
    return LayersReport(
        engine.name, str(engine.dtype).removeprefix("torch."), len(rows), num_tokens, sites, unseen
    )


def operators(computed: set[Site], seen: set[Site]) -> Iterator[tuple[Site, str]]:
    """Yield the sites of both sides with the operators that each one shows.

    Those are its own, and those right before it in its layer that the engine does not show.
    """
    hidden: list[str] = []
    layer = None
    for site in sorted(computed):
        if site.layer != layer:
            hidden, layer = [], site.layer
        if site not in seen:
            hidden.append(site.operator)
            continue
        yield site, " or ".join(dict.fromkeys([*hidden, site.operator]))
        hidden = []


def gap_and_floor(
    found: Tensor, truth: Tensor, others: list[Tensor], smallest: float
) -> tuple[Tensor, Tensor]:
    """Return the distances to the truth of a result and of other ways to compute it, [tokens].

    All are [tokens, width]. The second is at least `smallest`; a result of another width is
    infinitely far away.
    """
    exact = truth.double()
    size = rms(exact).clamp_min(torch.finfo(torch.float32).tiny)
    floor = torch.stack([rms(other.double() - exact) / size for other in others]).amax(0)
    if found.shape != truth.shape:
        return torch.full_like(size, torch.inf), floor.clamp_min(smallest)
    return rms(found.double() - exact) / size, floor.clamp_min(smallest)


def rms(values: Tensor) -> Tensor:
    """Root mean square over features, [tokens]."""
    return values.square().mean(-1).sqrt()


def site_report(site: Site, operator: str, gaps: list[Tensor]) -> SiteReport:
    """Report a site; `gaps` are [created, floor, total and its floor; tokens seen] of each row."""
    created, floor, total, total_floor = torch.cat(gaps, 1)
    created = created.nan_to_num(torch.inf, torch.inf)
    floor = torch.maximum(floor, floor.median()) if len(floor) else floor
    ratio = created / floor
    most = map(largest, (created, floor, ratio, total, total_floor))
    return SiteReport(site, operator, len(created), int((ratio > LIMIT).sum()), *most)


def largest(values: Tensor) -> float:
    """Return the largest value, 0 of none."""
    return float(values.max()) if len(values) else 0.0


def ambiguous_routing(exact: Results, engine: dict[Site, Tensor]) -> dict[int | None, Tensor]:
    """Return, per layer with experts, the tokens whose choice rounding decides, bool [tokens].

    The last expert chosen and the first one left out are no further apart than twice the difference
    between both sides' router logits.
    """
    found = {}
    for site in exact:
        if site.result != "routing":
            continue
        logits = exact[Site("router", site.layer)].double()
        theirs = engine.get(Site("router", site.layer), logits).double()
        chosen = exact[site] != 0
        last = logits.masked_fill(~chosen, torch.inf).amin(-1)
        next_one = logits.masked_fill(chosen, -torch.inf).amax(-1)
        found[site.layer] = last - next_one <= 2 * (theirs - logits).abs().amax(-1)
    return found
