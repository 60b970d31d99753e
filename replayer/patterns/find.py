"""Find the pattern of a difference: read what differs on both sides, and recognise it."""

import re
from collections.abc import Sequence
from dataclasses import replace

from recorder import RecordedStep
from replayer.patterns.pairs import Pairs, RowPair, read_pairs
from replayer.patterns.pattern import Pattern, count
from replayer.patterns.relations import relate
from replayer.patterns.rows import pattern_of_order, pattern_of_rows
from replayer.patterns.updates import pattern_of_micro_batches, pattern_of_parameters
from replayer.stages import Foreign, StageDifference

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
        return pattern_of_order(left, right)
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
