"""How recorded values of rows differ from recomputed ones that no option explains."""

import numpy as np

from replayer.compare.patterns import recognise
from replayer.compare.relations import EPSILON, Pairs, pair_of
from replayer.crosscheck.step_rows import Bools, Floats, StepRows

CLOSE = 1e-5  # of the largest value: float32 is nearer, and values of other rows are not
MOST = 0.8  # of the rows, that are another row's
COMPARED = 512  # rows
TOKENS = 8  # the first of each row
FEWEST = 3  # tokens that cannot agree by chance


def shape_of(rows: StepRows, recorded: Floats, found: Floats, wrong: Bools) -> str | None:
    """Say how values [N] or [N, T] differ, of which some are `wrong`; nan is not known."""
    if recorded.ndim == 0:
        return None
    recorded, found = (of.reshape(len(recorded), -1) for of in (recorded, found))
    known = ~np.isnan(recorded) & ((recorded != 0) | (found != 0))
    values = np.unique(recorded[known])
    nearest = values[np.searchsorted((values[1:] + values[:-1]) / 2, found)]
    same = np.abs(nearest - found) <= CLOSE * np.abs(values).max()  # but for rounding
    expected = np.where(wrong.reshape(found.shape), np.where(same, nearest, found), recorded)
    per_token = any(len(np.unique(own[of])) > 1 for own, of in zip(recorded, known, strict=True))
    pairs = []
    for row in np.flatnonzero(known.any(1)).tolist():
        of = np.flatnonzero(known[row])[: None if per_token else 1]
        rank, number, *name = rows.place[row].tolist()
        pairs.append(pair_of(rank, number, (name[0], name[1]), expected[row, of], recorded[row, of]))
    num_ranks = len(np.unique(rows.place[:, 0]))
    pattern = recognise(Pairs(pairs, EPSILON["F32"], False, per_token, False, num_ranks))
    is_vague = pattern is None or pattern.kind in ("rounding", "replaced")
    return None if is_vague or pattern is None else f"with A as expected and B as recorded, {pattern.why}"


def is_of_others(mask: Bools, recorded: Floats, found: Floats, apart: float) -> bool:
    """Whether most rows of values per token are another row's, as far as both go."""
    one, other = np.full((2, min(len(mask), COMPARED), TOKENS), np.nan)
    for row, begin in enumerate(mask[: len(one)].argmax(1).tolist()):
        at = np.flatnonzero(mask[row, begin : begin + TOKENS])
        one[row, at], other[row, at] = recorded[row, begin + at], found[row, begin + at]
    one[one == 0] = np.nan  # padding of the other row
    gaps = np.abs(one[:, None] - other[None])
    same = (np.nan_to_num(gaps) < apart).all(2) & ((~np.isnan(gaps)).sum(2) >= FEWEST)
    return bool((same.any(1) & ~same.diagonal()).mean() > MOST)
