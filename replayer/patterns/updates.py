"""Recognise how the updates of a step differ: micro-batches, and parameters by their checksums."""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from recorder import MicroBatch, Outcome, RecordedStep
from replayer.patterns.pairs import EPSILON, Pairs, RowPair, pair_of
from replayer.patterns.pattern import Pattern, count
from replayer.patterns.relations import offset, rounding, scaled
from replayer.stages import StageDifference, read_outcomes

LAYER = re.compile(r"\.(\d+)\.")  # the first number of a parameter's name is its layer
EMBEDDINGS = re.compile(r"(embed|wte|wpe|lm_head)", re.IGNORECASE)


def pattern_of_micro_batches(
    left: RecordedStep, right: RecordedStep, difference: StageDifference, fact: str
) -> Pattern | None:
    """Recognise the pattern of rows or numbers of micro-batches, in the minibatch of a difference.

    Only that minibatch: the next one starts from other weights.
    """
    here, there = read_outcomes(left), read_outcomes(right)
    if len(here) != len(there):
        return None
    if fact == "rows":
        return pattern_of_division(here, there)
    pairs = numbers_of(here, there, difference.minibatch, fact)
    rows = [row for row in pairs.rows if not row.is_equal]
    if not rows:
        return None
    ranks = {row.rank for row in rows}
    how = scaled(pairs, rows) or offset(pairs, rows) or rounding(pairs, rows)
    if len(here) > 1 and len(ranks) == 1:
        others = sum(row.rank not in ranks for row in pairs.rows)
        why = (
            f"only micro-batches of rank {min(ranks)} differ, {len(rows)}; {others} of other ranks are equal"
        )
        return Pattern("one rank", f"{why}: {how.why}" if how else why, float(min(ranks)))
    return how


def numbers_of(here: Sequence[Outcome], there: Sequence[Outcome], minibatch: int | None, fact: str) -> Pairs:
    """Return a number of the micro-batches that both have with the same rows, one a row."""
    rows: list[RowPair] = []
    for rank, outcomes in enumerate(zip(here, there, strict=True)):
        sides = [in_minibatch(outcome, minibatch) for outcome in outcomes]
        for number, (a, b) in enumerate(zip(*sides, strict=False)):
            if a.rows == b.rows:
                left, right = (np.array([float(getattr(side, fact))]) for side in (a, b))
                rows.append(pair_of(rank, number, (number, 0), left, right))
    return Pairs(
        rows, EPSILON["F32"], is_category=False, per_token=True, in_prompt=False, num_ranks=len(here)
    )


def in_minibatch(outcome: Outcome, minibatch: int | None) -> list[MicroBatch]:
    return [one for one in outcome.micro_batches if one.minibatch == minibatch]


def pattern_of_division(here: Sequence[Outcome], there: Sequence[Outcome]) -> Pattern | None:
    """Recognise rows that are divided into minibatches and micro-batches in another way."""
    sides = [
        [[one.rows for one in outcome.micro_batches if one.rows] for outcome in outcomes]
        for outcomes in (here, there)
    ]
    flat = [
        sorted((rank, row) for rank, groups in enumerate(side) for g in groups for row in g) for side in sides
    ]
    if flat[0] != flat[1]:
        missing = len(set(flat[0]) ^ set(flat[1]))
        return (
            Pattern("other support", f"{count(missing, 'row')} only in the micro-batches of A or of B")
            if missing
            else None
        )
    num_groups = sum(map(len, sides[0]))
    as_sets = [[sorted(tuple(sorted(group)) for group in groups) for groups in side] for side in sides]
    if as_sets[0] != as_sets[1]:
        return Pattern(
            "same set, other order",
            f"the same {count(len(flat[0]), 'row')}, divided into other micro-batches ({num_groups} in A, "
            f"{sum(map(len, sides[1]))} in B)",
        )
    in_order = [[[tuple(sorted(group)) for group in groups] for groups in side] for side in sides]
    if in_order[0] == in_order[1]:
        return Pattern(
            "same set, other order", f"the same {num_groups} micro-batches, their rows in another order"
        )
    return Pattern(
        "same set, other order", f"the same {num_groups} micro-batches, {how_ordered(here, there)}"
    )


def how_ordered(here: Sequence[Outcome], there: Sequence[Outcome]) -> str:
    """Describe the order of the same micro-batches: reversed, minibatches exchanged, or another."""
    minibatches = [
        [
            [[one.rows for one in in_minibatch(outcome, number)] for number in numbers_in(outcome)]
            for outcome in outcomes
        ]
        for outcomes in (here, there)
    ]
    if all(b == [group[::-1] for group in a] for a, b in zip(*minibatches, strict=True)):
        return "in each minibatch in reverse order"
    if all(b == a[::-1] for a, b in zip(*minibatches, strict=True)):
        return "the minibatches in reverse order"
    return "in another order"


def numbers_in(outcome: Outcome) -> list[int]:
    """Return the minibatches of an outcome, in order."""
    return sorted({one.minibatch for one in outcome.micro_batches})


def pattern_of_parameters(
    left: RecordedStep, right: RecordedStep, difference: StageDifference
) -> Pattern | None:
    """Recognise which gradients or weights differ, by their checksums."""
    sides = [checksums(read_outcomes(step)[0], difference) for step in (left, right)]
    shared = [name for name in sides[0] if name in sides[1]]
    different = [name for name in shared if sides[0][name] != sides[1][name]]
    if not different or len(shared) != len(sides[0]) or len(shared) != len(sides[1]):
        return None
    of = "gradients" if difference.stage == "gradient" else "weights"
    if len(different) > 1 and sorted(sides[0][n] for n in different) == sorted(
        sides[1][n] for n in different
    ):
        return Pattern("permuted", f"{len(different)} {of} have the values of one another: {some(different)}")
    if len(different) == len(shared):
        return Pattern("every tensor", f"the {of} of all {len(shared)} parameters differ", float(len(shared)))
    rest = f"the {of} of the other {len(shared) - len(different)} parameters are equal"
    if len(different) == 1:
        what = "the embeddings" if EMBEDDINGS.search(different[0]) else different[0]
        return Pattern(
            "one tensor",
            f"only {what} differ: {rest}" if what != different[0] else f"only {what}: {rest}",
            1.0,
        )
    layers = {match[1] if (match := LAYER.search(name)) else None for name in different}
    if len(layers) == 1 and None not in layers:
        layer = int(next(iter(filter(None, layers))))
        return Pattern(
            "one layer", f"only {len(different)} parameters of layer {layer}: {rest}", float(layer)
        )
    return Pattern("some tensors", f"{some(different)}: {rest}", float(len(different)))


def checksums(outcome: Outcome, difference: StageDifference) -> Mapping[str, str]:
    """Return the checksums that a difference is of: after the step, or of a minibatch."""
    if difference.minibatch is None:
        return outcome.checksums
    of = outcome.minibatches[difference.minibatch]
    return of.gradients if difference.stage == "gradient" else of.weights


def some(names: Sequence[str]) -> str:
    """Return up to three names and the number of the rest."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
