"""Other rotary embeddings: the base, or a factor of all positions, that explains the logprobs.

The frequencies of base b are b^(-2i/d), so those of another base are powers of the model's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from consistency.case import Alternative
from consistency.hypotheses import mean_square, select_rows, spread_rows
from consistency.score import Scorer, score_logprobs
from consistency.tokens import Floats, Sequences

BASES = (1e3, 2.5e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2.5e5, 5e5, 1e6, 2e6, 5e6, 1e7, 1e8)
FACTORS = (0.25, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0)
TOKENS_TO_SCREEN = 256
LEAST_GAIN = 1.5  # of squares, below which the best candidate is not scored on all tokens
REFINEMENTS = 3
POINTS = 5


def rotary_alternatives(scorer: Scorer, rows: Sequences, temperature: float) -> list[Alternative]:
    """Score with the rotary base, or factor of positions, that fits best (R49)."""
    own = rotary_base(scorer)
    if own is None:
        return []
    screened = select_rows(rows, spread_rows(rows, TOKENS_TO_SCREEN))
    engine = screened.engine_logprobs[screened.scored]
    usable = np.isfinite(engine)

    def miss(base: float, factor: float) -> float:
        predicted = scored_with(scorer, screened, temperature, np.log(base) / np.log(own), factor)
        return mean_square(engine[usable], predicted[usable])

    as_is = miss(own, 1.0)
    misses = {(base, 1.0): miss(base, 1.0) for base in BASES}
    misses |= {(own, factor): miss(own, factor) for factor in FACTORS}
    best = min(misses, key=lambda key: misses[key])
    if best[1] == 1.0:
        grid = sorted({base for base, factor in misses if factor == 1.0} | {own})
        low, high = grid[max(grid.index(best[0]) - 1, 0)], grid[min(grid.index(best[0]) + 1, len(grid) - 1)]
        for _ in range(REFINEMENTS):
            points = np.geomspace(low, high, POINTS + 2)
            misses |= {(float(base), 1.0): miss(float(base), 1.0) for base in points}
            best = min(misses, key=lambda key: misses[key])
            step = (high / low) ** (1 / (POINTS + 1))
            low, high = best[0] / step, best[0] * step
    if misses[best] * LEAST_GAIN > as_is:
        return []
    base, factor = best
    name = f"rotary base {base:.3g}" if factor == 1.0 else f"positions divided by {factor:g}"
    logprobs = scored_with(scorer, rows, temperature, np.log(base) / np.log(own), factor)
    return [Alternative("R49", f"{name} (the model's base is {own:.3g})", logprobs)]


def scored_with(scorer: Scorer, rows: Sequences, temperature: float, power: float, factor: float) -> Floats:
    with changed_frequencies(scorer, power, factor):
        return score_logprobs(scorer, rows, temperature=temperature)


def frequencies(scorer: Scorer) -> list[torch.Tensor]:
    return [buffer for name, buffer in scorer.model.named_buffers() if name.endswith("inv_freq")]


def rotary_base(scorer: Scorer) -> float | None:
    found = [buffer for buffer in frequencies(scorer) if buffer.numel() > 1]
    if not found or not 0 < float(found[0][1]) < 1:
        return None
    return float(found[0][1].double() ** -len(found[0]))


@contextmanager
def changed_frequencies(scorer: Scorer, power: float, factor: float) -> Iterator[None]:
    kept = [(buffer, buffer.clone()) for buffer in frequencies(scorer)]
    for buffer, own in kept:
        buffer.copy_((own.double() ** power / factor).to(own.dtype))
    try:
        yield
    finally:
        for buffer, own in kept:
            buffer.copy_(own)
