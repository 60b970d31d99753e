"""Hypotheses that need no logits: offset, units, shift, mispaired rows, other model."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from consistency.case import Alternative
from consistency.replay import RESIDUAL_BOUND, Prediction, Replays
from consistency.tokens import Floats, Ints, Sequences

SHIFTS = (1, -1, 2, -2, 3, -3)
TOKENS_TO_PAIR = 24


def with_derived(replays: Replays, sequences: Sequences, alternatives: Sequence[Alternative]) -> Replays:
    """Add every hypothesis that follows from the replayed logprobs alone."""
    row = sequences.row_of_token[sequences.scored][replays.sample]
    engine, base = replays.engine, replays.base
    offset = float(np.median(engine - base))
    derived = [
        Prediction("R07", "constant", offset, base + offset),
        Prediction("R08", "logarithms to base 2", 1 / np.log(2), base / np.log(2)),
        Prediction("R08", "logarithms to base 10", 1 / np.log(10), base / np.log(10)),
        Prediction("R09", "most likely token", 0.0, replays.largest),
        *(Prediction("R11", "shift", float(by), shifted(base, row, by)) for by in SHIFTS),
        mispaired_rows(engine, base, row),
        *(Prediction(a.cause, a.name, 0.0, a.logprobs) for a in alternatives),
    ]
    place = places_in_rows(row)
    forbidden = [forbidden_initially(engine, base, p, place) for p in replays.predictions if p.cause == "R06"]
    others = [p for p in replays.predictions if p.cause != "R06"]
    return replace(replays, predictions=(*others, *derived, *forbidden))


def places_in_rows(row: Ints) -> Ints:
    """Return the index of each token in its row, int64 [sample]; rows are contiguous."""
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    return np.arange(len(row)) - np.repeat(starts, np.diff([*starts, len(row)]))


def shifted(base: Floats, row: Ints, by: int) -> Floats:
    """Return the logprob `by` tokens later in the same row, or the token's own at the row's end."""
    source = np.clip(np.arange(len(base)) + by, 0, len(base) - 1)
    return np.where(row[source] == row, base[source], base)


def mispaired_rows(engine: Floats, base: Floats, row: Ints) -> Prediction:
    """Predict each row's logprobs by those of the row that fits best.

    `parameter` is the share of rows that another row fits best.
    """
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    ends = np.append(starts[1:], len(row))
    heads = np.full((2, len(starts), TOKENS_TO_PAIR), np.nan)
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        count = min(end - start, TOKENS_TO_PAIR)
        heads[0, index, :count], heads[1, index, :count] = (
            engine[start : start + count],
            base[start : start + count],
        )
    predicted, moved = base.copy(), 0
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        misses = np.minimum(np.abs(heads[0, index] - heads[1]), RESIDUAL_BOUND)
        partner = int(np.argmin(np.where(np.isnan(misses), RESIDUAL_BOUND, misses).mean(1)))
        moved += partner != index
        count = min(end - start, ends[partner] - starts[partner])
        predicted[start : start + count] = base[starts[partner] : starts[partner] + count]
    return Prediction("R12", "mispaired rows", moved / len(starts), predicted)


def forbidden_initially(engine: Floats, base: Floats, everywhere: Prediction, place: Ints) -> Prediction:
    """EOS forbidden for the first `parameter` tokens of each row, as many as fit best.

    `parameter` is infinite if it is forbidden for all of them.
    """
    saved = np.minimum(np.abs(engine - base), RESIDUAL_BOUND) - np.minimum(
        np.abs(engine - everywhere.logprobs), RESIDUAL_BOUND
    )
    by_place = np.cumsum(np.bincount(place, weights=saved))
    last = int(np.argmax(by_place))
    predicted = np.where(place <= last, everywhere.logprobs, base)
    is_all = last >= int(0.95 * place.max())
    return Prediction("R06", everywhere.name, np.inf if is_all else float(last + 1), predicted)
