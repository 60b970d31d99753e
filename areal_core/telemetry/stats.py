"""Statistics of a step: masked values, scalars and timings, reduced over ranks.

Each record is reduced at once, on its own device and without synchronisation, to count, sum,
minimum and maximum. At the end of a step the ranks exchange these by name, as one small object, so
a rank that has recorded nothing under some name cannot leave the others waiting in a collective.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed
from torch import Tensor

from areal_core.algorithm.alignment import masked

PART = 2**15  # elements that are reduced at a time


class Reduce(Enum):
    """The reduction of a name's values."""

    AVG_MIN_MAX = "avg_min_max"  # name/avg, name/min, name/max
    AVG = "avg"  # name
    SUM = "sum"  # name
    SCALAR = "scalar"  # name: mean over calls and ranks; name__count: their number
    TIMING = "timing"  # name: mean over calls and ranks


@dataclass
class Moments:
    """Count, sum, minimum and maximum of everything recorded under one name."""

    reduce: Reduce
    count: float
    total: float
    minimum: float
    maximum: float

    def joined(self, other: "Moments") -> "Moments":
        """Return the moments of both sets of values."""
        return Moments(
            self.reduce,
            self.count + other.count,
            self.total + other.total,
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
        )


Records = dict[str, Moments]


class Stats:
    """The statistics of one step.

    Scopes belong to the thread or task that opened them; records are not shared between threads.

    Args:
        counts: True if this rank's records are included; of ranks with the same rows only one is.
        gather: returns the records of all ranks in rank order; by default over torch.distributed.
    """

    def __init__(
        self, counts: bool = True, gather: "Callable[[Records], list[Records]] | None" = None
    ) -> None:
        self.counts, self.gather = counts, gather
        self._scope: ContextVar[str] = ContextVar("scope", default="")
        self._masks: dict[str, Tensor] = {}
        self._records: dict[str, list[tuple[Reduce, Tensor]]] = {}
        # Called at the end of each timing with its name, start and end (time.perf_counter_ns).
        self.timing_listeners: list[Callable[[str, int, int], None]] = []

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Put `name/` before every name recorded inside."""
        token = self._scope.set(f"{self._scope.get()}{name}/")
        try:
            yield
        finally:
            self._scope.reset(token)

    def denominator(self, **masks: Tensor) -> None:
        """Set boolean masks for later averages; each is reported as its number of true elements."""
        for name, mask in masks.items():
            if mask.dtype != torch.bool:
                raise ValueError(f"denominator {name!r} has dtype {mask.dtype}; expected torch.bool")
            self._masks[self._scope.get() + name] = mask
            self._record(name, Reduce.SUM, mask.count_nonzero().reshape(1))

    def stat(self, denominator: str, reduce: Reduce = Reduce.AVG_MIN_MAX, **values: Tensor) -> None:
        """Record values of the shape of the mask `denominator`, of this or an outer scope."""
        mask = self._mask(denominator)
        for name, value in values.items():
            if value.shape != mask.shape:
                raise ValueError(
                    f"stat {name!r} has shape {list(value.shape)} and its denominator {denominator!r} "
                    f"{list(mask.shape)}; they must be equal"
                )
            self._record(name, reduce, value.detach(), mask)

    def scalar(self, **values: float | Tensor) -> None:
        """Record single numbers."""
        for name, value in values.items():
            number = torch.as_tensor(value, dtype=torch.float64).detach().reshape(1)
            self._record(name, Reduce.SCALAR, number)

    @contextmanager
    def discarded(self) -> Iterator[None]:
        """Forget what is recorded inside."""
        records = {name: list(entries) for name, entries in self._records.items()}
        masks = dict(self._masks)
        try:
            yield
        finally:
            self._records, self._masks = records, masks

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Record the seconds spent inside as `timeperf/name`, whatever the scope."""
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            # deterministic: a statistic of time
            end_ns = time.perf_counter_ns()
            for listener in self.timing_listeners:
                listener(name, start_ns, end_ns)
            seconds = torch.tensor([(end_ns - start_ns) / 1e9], dtype=torch.float64)
            four = _four_numbers(seconds, torch.ones_like(seconds, dtype=torch.bool))
            self._records.setdefault(f"timeperf/{name}", []).append((Reduce.TIMING, four))

    def export(self, gather: "Callable[[Records], list[Records]] | None" = None) -> dict[str, float]:
        """Return everything recorded since the last export, reduced over ranks and sorted by name.

        Collective: every rank must call it. The records are cleared. `gather` returns the records
        of all ranks in rank order. Names without an element on any rank are left out.
        """
        counted = self._records if self.counts else {}
        numbers = _read([four for entries in counted.values() for _, four in entries])
        records = {
            name: _joined([(kind, next(numbers)) for kind, _ in entries]) for name, entries in counted.items()
        }
        self._records, self._masks = {}, {}
        joined: Records = {}
        for of_rank in (gather or self.gather or gather_over_ranks)(records):
            for name, moments in of_rank.items():
                joined[name] = joined[name].joined(moments) if name in joined else moments
        return {key: value for name in sorted(joined) for key, value in _reported(name, joined[name])}

    def _mask(self, name: str) -> Tensor:
        parts = self._scope.get().split("/")
        for depth in range(len(parts) - 1, -1, -1):
            full = "/".join([*parts[:depth], name])
            if full in self._masks:
                return self._masks[full]
        raise ValueError(
            f"there is no denominator {name!r} in scope {self._scope.get()!r}; known: {', '.join(self._masks) or 'none'}"
        )

    def _record(self, name: str, reduce: Reduce, values: Tensor, mask: Tensor | None = None) -> None:
        mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
        self._records.setdefault(self._scope.get() + name, []).append((reduce, _four_numbers(values, mask)))


def gather_over_ranks(records: Records) -> list[Records]:
    """Return the records of all ranks in rank order; only ours without torch.distributed.

    Collective.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [records]
    gathered: list[Records] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, records)
    return gathered


def _four_numbers(values: Tensor, mask: Tensor) -> Tensor:
    """Return [4] float64 on the device of `values`: count, sum, minimum, maximum over the mask.

    Does not synchronise with the device. Values are taken in parts that fit into a processor's
    cache in float64, and that one thread sums.
    """
    count = mask.count_nonzero().double()
    if values.numel() == 0:
        return torch.stack([count, count, count + torch.inf, count - torch.inf])
    parts = []
    for part, inside in zip(values.reshape(-1).split(PART), mask.reshape(-1).split(PART), strict=True):
        numbers = part if part.dtype == torch.float32 else part.double()
        total = masked(numbers, inside).double().sum()
        lowest, highest = (masked(numbers, inside, edge) for edge in (torch.inf, -torch.inf))
        parts.append(torch.stack([total, lowest.amin().double(), highest.amax().double()]))
    totals, least, most = torch.stack(parts).unbind(1)  # [parts]
    return torch.stack([count, totals.sum(), least.amin(), most.amax()])


def _read(fours: list[Tensor]) -> Iterator[list[float]]:
    """Yield the numbers of each tensor, in order, after one transfer from each device."""
    on_device: dict[torch.device, list[Tensor]] = {}
    for four in fours:
        on_device.setdefault(four.device, []).append(four)
    rows = {device: iter(torch.stack(tensors).tolist()) for device, tensors in on_device.items()}
    for four in fours:
        yield next(rows[four.device])


def _joined(entries: list[tuple[Reduce, list[float]]]) -> Moments:
    kinds = {reduce for reduce, _ in entries}
    assert len(kinds) == 1, f"one name was recorded as {kinds}"
    kind = kinds.pop()
    return functools.reduce(Moments.joined, [Moments(kind, *four) for _, four in entries])


def _reported(name: str, moments: Moments) -> Iterator[tuple[str, float]]:
    if moments.reduce is Reduce.SUM:
        yield name, moments.total
        return
    if moments.count == 0:
        return
    average = moments.total / moments.count
    if moments.reduce is Reduce.AVG_MIN_MAX:
        yield f"{name}/avg", average
        yield f"{name}/max", moments.maximum
        yield f"{name}/min", moments.minimum
    else:
        yield name, average
    if moments.reduce is Reduce.SCALAR:
        yield f"{name}__count", moments.count
