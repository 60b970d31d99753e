"""Completions that belong to the prompts of other requests: replies exchanged as a whole."""

import numpy as np

from consistency.case import Alternative
from consistency.hypotheses import RESIDUAL_BOUND
from consistency.score import Scorer, score_logprobs
from consistency.tokens import Floats, Ints, Sequences

ROWS_TO_TRY = 4
TOKENS_TO_TRY = 16  # of a completion
MOST_TOKENS = 60_000  # to score before one row fits another prompt
MOST_TOKENS_AFTER = 500_000
EXPLAINED = 0.2  # of a row's mean |D|, at most, left with the right prompt


def prompt_alternatives(
    scorer: Scorer, rows: Sequences, base: Floats, temperature: float
) -> list[Alternative]:
    """Score bad rows after the prompts of other rows (R12).

    Args:
        base: logprobs of `rows` as they are, float64 [scored].
    """
    if rows.num_rows < 2 or not all(one_turn(rows, row) for row in range(rows.num_rows)):
        return []
    row_of_place = rows.row_of_token[rows.scored]
    size = bounded(rows.engine_logprobs[rows.scored] - base)
    counts = np.bincount(row_of_place, minlength=rows.num_rows)
    means = np.bincount(row_of_place, size, rows.num_rows) / np.maximum(counts, 1)
    worst = np.argsort(-means, kind="stable")
    num_tried = min(ROWS_TO_TRY, MOST_TOKENS // int(rows.cu_seqlens[-1]))
    tried = {int(row): best_prompt(scorer, rows, int(row), temperature) for row in worst[:num_tried]}
    if not any(fits(partner, means[row], row) for row, partner in tried.items()):
        return []
    predicted, moved, left = base.copy(), 0, MOST_TOKENS_AFTER
    for row in worst[means[worst] > EXPLAINED * means[worst[0]]].tolist():
        left -= int(rows.cu_seqlens[-1])
        partner = tried.get(row) or (best_prompt(scorer, rows, row, temperature) if left > 0 else (row, 0.0))
        if fits(partner, means[row], row):
            moved += 1
            predicted[row_of_place == row] = after_prompts(
                scorer, rows, row, [partner[0]], None, temperature
            )[0]
    return [Alternative("R12", f"the prompts of other rows for {moved} of {rows.num_rows} rows", predicted)]


def fits(partner: tuple[int, float], mean: float, row: int) -> bool:
    """Return whether another row's prompt explains a row."""
    return partner[0] != row and partner[1] < EXPLAINED * mean


def one_turn(rows: Sequences, row: int) -> bool:
    return bool((np.diff(rows.sampled[rows.row(row)].astype(int)) >= 0).all())


def bounded(difference: Floats) -> Floats:
    """Absolute differences, bounded; unusable ones count as 0."""
    return np.minimum(np.abs(np.nan_to_num(difference, posinf=0, neginf=0)), RESIDUAL_BOUND)


def best_prompt(scorer: Scorer, rows: Sequences, row: int, temperature: float) -> tuple[int, float]:
    values = rows.engine_logprobs[rows.row(row)][rows.sampled[rows.row(row)]][:TOKENS_TO_TRY]
    every = list(range(rows.num_rows))
    misses = bounded(values - after_prompts(scorer, rows, row, every, TOKENS_TO_TRY, temperature)).mean(1)
    best = int(np.argmin(misses))
    return best, float(misses[best])


def after_prompts(
    scorer: Scorer, rows: Sequences, row: int, prompts: list[int], count: int | None, temperature: float
) -> Floats:
    def split(one: int) -> tuple[Ints, Ints]:
        ids, sampled = rows.input_ids[rows.row(one)], rows.sampled[rows.row(one)]
        return ids[~sampled], ids[sampled]

    completion = split(row)[1][:count]
    joined = [np.concatenate([split(one)[0], completion]) for one in prompts]
    lengths = np.array([len(ids) for ids in joined])
    packed = Sequences(
        np.concatenate(joined),
        np.concatenate([[0], np.cumsum(lengths)]),
        np.concatenate([np.arange(length) >= length - len(completion) for length in lengths]),
        np.zeros(lengths.sum()),
        images=None if rows.images is None else tuple(rows.images[one] for one in prompts),
    )
    return score_logprobs(scorer, packed, temperature=temperature).reshape(len(prompts), -1)
