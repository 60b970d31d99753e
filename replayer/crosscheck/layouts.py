"""A step must not depend on its layout: two records of equal rows, and the factor between them.

Accumulation, micro-batches, ranks and padding decide how the rows of a step are computed, not what
comes out. The first number that differs is found, and a whole factor names the bug: of 4 where one
layout has 4 micro-batches and the other one, it is a mean where a sum belongs, or the other way.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np

from replayer.crosscheck.options import Options
from replayer.crosscheck.step_rows import StepRows
from replayer.crosscheck.their_configs import options_of

TOLERANCE = 1e-3  # of a value: float32 sums in another order differ by less, bfloat16 by more
OF_WHOLE = 0.01  # of a factor, that a count may be off
NO_COUNT = "no count of the layouts"
IN_BOTH = ("ranks", "rows of a group", "tokens of a row")  # a factor also where they do not change


@dataclass(frozen=True)
class Difference:
    """A number of both layouts; `ratio` is the second one's to the first one's."""

    what: str
    one: float
    other: float
    ratio: float
    named: str


@dataclass(frozen=True)
class Invariance:
    """`verdict` is equal, differs or not checked; `layouts` what differs between the layouts."""

    verdict: str
    step: int
    sentence: str
    differences: tuple[Difference, ...]
    compared: tuple[str, ...]
    layouts: dict[str, tuple[float, float]]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        return asdict(self)


def layout_of(rows: StepRows) -> dict[str, float]:
    """Return the counts of a layout: micro-batches, ranks, rows of a group, tokens of a row."""
    try:
        configured = options_of(rows.origin)
        options, counts = configured.options, dict(configured.counts)
    except ValueError:
        options, counts = Options(), {}
    found: dict[str, float] = {
        "micro-batches": options.micro_batches,
        "ranks": len(np.unique(rows.place[:, 0])),
        "context-parallel ranks": options.context_parallel,
        "rows of a group": float(np.bincount(rows.groups).max()),
        "tokens of a row": float(rows.mask.sum() / len(rows.mask)),
    }
    return found | {name: float(count) for name, count in counts.items() if name not in OF_ROWS}


OF_ROWS = ("n_samples_per_prompt", "num_generations", "num_generations_per_prompt", "n", "rollout_batch_size")


def order_of(rows: StepRows) -> list[int]:
    """Return the rows ordered by their tokens, whatever rank and place they have."""
    return sorted(range(len(rows.lengths)), key=lambda at: rows.input_ids[at, : rows.lengths[at]].tobytes())


def name_factor(ratio: float, one: Mapping[str, float], other: Mapping[str, float]) -> str:
    """Say which count of two layouts a ratio is: one that changes between them, or is in both."""
    ratios = {f"the {name}": other.get(name, 1.0) / count for name, count in one.items() if count}
    changed = {name: factor for name, factor in ratios.items() if factor != 1}
    same = {f"the {name}": one[name] for name in IN_BOTH if ratios.get(f"the {name}") == 1}
    pairs = [pair for pair in combinations((changed | same).items(), 2) if pair[0][0] in changed]
    factors = changed | {
        f"{a} times {b}": x * (y if b in changed or x > 1 else 1 / y) for (a, x), (b, y) in pairs
    }
    factors |= {f"the square root of {name}": factor**0.5 for name, factor in changed.items()} | same
    for name, factor in factors.items():
        for value, verb in ((factor, "multiplied by"), (1 / factor, "divided by")):
            if factor != 1 and abs(ratio / value - 1) < OF_WHOLE:
                return f"{verb} {name}"
    return NO_COUNT


def compare_layouts(one: StepRows, other: StepRows) -> Invariance:
    """Compare advantages, loss and gradient norm of equal rows.

    Raises ValueError for other rows.
    """
    orders = order_of(one), order_of(other)
    same = len(orders[0]) == len(orders[1]) and all(
        np.array_equal(one.input_ids[a, : one.lengths[a]], other.input_ids[b, : other.lengths[b]])
        for a, b in zip(*orders, strict=True)
    )
    if not same:
        raise ValueError(
            f"step {one.step} of {one.origin.path} and step {other.step} of {other.origin.path} have other rows: "
            "train on the same rows in both layouts"
        )
    layouts = layout_of(one), layout_of(other)
    both = {name: (layouts[0].get(name, 1.0), layouts[1].get(name, 1.0)) for name in layouts[0] | layouts[1]}
    apart = {name: pair for name, pair in both.items() if pair[0] != pair[1]}
    pairs: list[tuple[str, float, float]] = []
    if "advantages" in one.tensors and "advantages" in other.tensors:
        values = [
            np.abs(s.tensors["advantages"][o][s.mask[o]]) for s, o in zip((one, other), orders, strict=True)
        ]
        wrong = np.flatnonzero(~np.isclose(values[0], values[1], rtol=TOLERANCE, atol=1e-5))
        at = int(wrong[0]) if len(wrong) else 0
        pairs.append(("the advantage of a token", float(values[0][at]), float(values[1][at])))
    for name, what in (("loss", "the loss of a step"), ("grad_norm", "the gradient norm of a step")):
        both_values = [
            [v for update in rows.updates if (v := getattr(update, name)) is not None]
            for rows in (one, other)
        ]
        if all(both_values):
            pairs.append((what, fmean(both_values[0]), fmean(both_values[1])))
    found = [
        Difference(what, a, b, ratio := b / a if a else float("inf"), name_factor(ratio, *layouts))
        for what, a, b in pairs
        if not np.isclose(a, b, rtol=TOLERANCE, atol=1e-7)
    ]
    compared = tuple(what for what, *_ in pairs)
    reason = "" if compared else "no loss, gradient norm or advantages are in both records"
    is_same = one.origin.config == other.origin.config and np.array_equal(
        one.place[:, :2], other.place[:, :2]
    )
    if compared and not found and not apart and is_same:
        reason = "both records have the same layout: train the rows with other ranks or micro-batches"
    if reason:
        return Invariance("not checked", one.step, reason, (), compared, apart)
    sentence = f"equal in both layouts: {', '.join(compared)}"
    if found:
        first = found[0]
        sentence = f"{first.what} depends on the layout: {first.one:.6g} and {first.other:.6g}, "
        sentence += f"a factor of {first.ratio:.4g}: {first.named}"
    return Invariance("differs" if found else "equal", one.step, sentence, tuple(found), compared, apart)
