"""Recognise the pattern of a difference: shifted by one, scaled, permuted, another support, ...

    difference of a stage ─> its tensor on both sides ─> where it differs ─┐
                                                         how it differs ───┴─> one pattern, or None

A pattern is a hint about the code: a constant factor means a norm, another support a mask, the same
set in another order a loader. None where the numbers do not prove one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from recorder import Outcome, RecordedStep
from replayer.compare.relations import (
    EPSILON,
    Pairs,
    Pattern,
    RowPair,
    count,
    listed,
    offset,
    pair_of,
    read_pairs,
    relate,
    rounding,
    scaled,
)
from replayer.compare.stages import (
    Foreign,
    StageDifference,
    find_rows,
    in_minibatch,
    paired_rows,
    read_outcomes,
)

MICRO_BATCH = re.compile(r"(rows|num_tokens|weight|loss) of rank \d+, micro-batch \d+")


def find_pattern(
    left: RecordedStep,
    right: RecordedStep,
    difference: StageDifference,
    foreign: Foreign = (False, False),
) -> Pattern | None:
    """Return the pattern of a difference of two recordings of a step, None if none is recognised.

    Args:
        difference: one that `compare_steps` found in them; best the one of `causal_tensor`.
        foreign: whether the left and the right record are of another trainer.

    Raises DamagedRecord.
    """
    if difference.name == "rows":
        return pattern_of_rows(left, right, foreign)
    if difference.name == "order of rows":
        rows, other_rows = find_rows(left), find_rows(right)
        names, others = list(rows), list(other_rows)
        moved = sum(name != other for name, other in zip(names, others, strict=True))
        ranks = sum(rows[name].rank != other_rows[name].rank for name in names)
        how = "reversed" if names == others[::-1] else f"{moved} of them at another place"
        why = f"the same {count(len(names), 'row')}, {how}" + (f", {ranks} on another rank" if ranks else "")
        return Pattern("same set, other order", why, float(moved))
    if fact := MICRO_BATCH.fullmatch(difference.name):
        return pattern_of_micro_batches(left, right, difference, fact[1])
    if difference.stage in ("gradient", "weights") and isinstance(difference.left or difference.right, str):
        return pattern_of_parameters(left, right, difference)
    pairs = read_pairs(left, right, difference, foreign)
    return None if pairs is None else recognise(pairs)


def recognise(pairs: Pairs) -> Pattern | None:
    """Return the pattern of a tensor's rows: how they differ, and where if it is a place."""
    rows = [row for row in pairs.rows if not row.is_equal]
    if not rows:
        return None
    how, where = relate(pairs, rows), locate(pairs)
    if where is None:
        return how
    if how is None or how.kind == "replaced":
        return where if how is None else replace(where, why=f"{where.why}: {how.why}")
    if where.kind == "later rows":
        return replace(how, why=f"{how.why}; {where.why}")
    return replace(where, why=f"{where.why}: {how.why}")


def locate(pairs: Pairs) -> Pattern | None:
    """Recognise rows that differ by their place: of one rank, a single one, all from one on."""
    equal = [row.is_equal for row in pairs.rows]
    num_rows, num_different = len(equal), equal.count(False)
    if ranks := only_rank(pairs.rows, pairs.num_ranks):
        rank, others = ranks
        return Pattern(
            "one rank",
            f"only rows of rank {rank} differ, {num_different} of {others[0]}; {others[1]} of other ranks are equal",
            float(rank),
        )
    if num_different == 1 and num_rows > 3:
        row = pairs.rows[equal.index(False)]
        return Pattern(
            "one row",
            f"only row {row.row} of rank {row.rank} differs (prompt {row.prompt_id}, sample {row.sample_id}), "
            f"{num_rows - 1} are equal",
            1.0,
        )
    first = equal.index(False)
    if first > 2 and num_different > 2 and not any(equal[first:]):
        return Pattern(
            "later rows",
            f"the first {first} rows are equal, all {count(num_different, 'row')} from the next on differ",
            float(num_different),
        )
    return None


def only_rank(rows: Sequence[RowPair], num_ranks: int) -> tuple[int, tuple[int, int]] | None:
    """Return the one rank whose rows differ, and the numbers of rows that it and others have.

    None unless at least two of its rows differ, and at least two rows of others are equal.
    """
    differing = [row.rank for row in rows if not row.is_equal]
    if num_ranks < 2 or len(set(differing)) != 1 or len(differing) < 2:
        return None
    own = sum(row.rank == differing[0] for row in rows)
    return (differing[0], (own, len(rows) - own)) if len(rows) - own > 1 else None


# facts of an update in the order of their computation: parameters precede the norm of gradients
FACTS = (r"rows of", r"num_tokens of", r"weight of", r"loss of", r"lr\b", r"(?!grad_norm)", r"grad_norm")


def causal_tensor(differences: tuple[StageDifference, ...]) -> StageDifference:
    """Return the difference of the first stage that its others follow from.

    `differences` are those of `compare_steps`, at least one.
    """
    first = differences[0]
    same_stage = [d for d in differences if (d.stage, d.minibatch) == (first.stage, first.minibatch)]
    return min(same_stage, key=order_of)


def order_of(difference: StageDifference) -> int:
    if difference.stage in ("batch", "logprobs", "advantages"):  # listed in the order of computation
        return 0
    return next(number for number, fact in enumerate(FACTS) if re.match(fact, difference.name))


def same_weights(left: RecordedStep, right: RecordedStep) -> bool | None:
    """Return whether both recordings of a step end with the same weights, by their checksums.

    None if one of them has none.
    """
    here, there = read_outcomes(left), read_outcomes(right)
    if not here or not there or not here[0].checksums or not there[0].checksums:
        return None
    return here[0].checksums == there[0].checksums


MIN_PROMPTS = 2  # of a shift


def pattern_of_rows(left: RecordedStep, right: RecordedStep, foreign: Foreign) -> Pattern | None:
    """Recognise rows that only one side has: other prompts, or fewer."""
    rows, other_rows = paired_rows(left, right, foreign)
    shift = None if any(foreign) else shift_of_prompts(set(rows), set(other_rows))
    if shift:
        return Pattern(
            "shifted",
            f"B has prompts {range_of(set(other_rows))} where A has {range_of(set(rows))}: "
            f"{count(abs(shift), 'prompt')} {'later' if shift > 0 else 'earlier'}",
            float(shift),
        )
    only = [len(set(rows) - set(other_rows)), len(set(other_rows) - set(rows))]
    if all(only):
        return Pattern(
            "replaced", f"{only[0]} of {len(rows)} rows of A are not in B, {only[1]} of B's not in A"
        )
    side, other = ("A", "B") if only[0] else ("B", "A")
    kind = "one row" if sum(only) == 1 else "other support"
    return Pattern(
        kind, f"{side} has {count(sum(only), 'row')} that {other} lacks, and all of its", float(sum(only))
    )


def shift_of_prompts(left: set[tuple[int, int]], right: set[tuple[int, int]]) -> int | None:
    """Return by how much all prompt ids of B exceed those of A, None if by different numbers."""
    prompts = {prompt for prompt, _ in left}
    if len(prompts) < MIN_PROMPTS or not right:
        return None
    shift = min(right)[0] - min(left)[0]
    return shift if shift and {(prompt + shift, sample) for prompt, sample in left} == right else None


def range_of(rows: set[tuple[int, int]]) -> str:
    """Return `4 to 7`: the lowest and highest prompt id."""
    return f"{min(rows)[0]} to {max(rows)[0]}"


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
    in_order = [[[tuple(sorted(group)) for group in groups] for groups in side] for side in sides]
    how = "their rows in another order" if in_order[0] == in_order[1] else how_ordered(here, there)
    why = f"the same {num_groups} micro-batches, {how}"
    if as_sets[0] != as_sets[1]:
        numbers = f"{num_groups} in A, {sum(map(len, sides[1]))} in B"
        why = f"the same {count(len(flat[0]), 'row')}, divided into other micro-batches ({numbers})"
    return Pattern("same set, other order", why)


def how_ordered(here: Sequence[Outcome], there: Sequence[Outcome]) -> str:
    """Describe the order of the same micro-batches: reversed, minibatches exchanged, or another."""
    minibatches = [
        [
            [
                [one.rows for one in in_minibatch(outcome, number)]
                for number in sorted({one.minibatch for one in outcome.micro_batches})
            ]
            for outcome in outcomes
        ]
        for outcomes in (here, there)
    ]
    if all(b == [group[::-1] for group in a] for a, b in zip(*minibatches, strict=True)):
        return "in each minibatch in reverse order"
    if all(b == a[::-1] for a, b in zip(*minibatches, strict=True)):
        return "the minibatches in reverse order"
    return "in another order"


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
        return Pattern(
            "permuted", f"{len(different)} {of} have the values of one another: {listed(different)}"
        )
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
    return Pattern("some tensors", f"{listed(different)}: {rest}", float(len(different)))


def checksums(outcome: Outcome, difference: StageDifference) -> Mapping[str, str]:
    """Return the checksums that a difference is of: after the step, or of a minibatch."""
    if difference.minibatch is None:
        return outcome.checksums
    of = outcome.minibatches[difference.minibatch]
    return of.gradients if difference.stage == "gradient" else of.weights
