"""Weights that an engine may have held instead: of earlier steps, of the base model, some tensors.

Each hypothesis predicts the log-prob of every token. It is judged by the Gaussian log-likelihood
that it gains over the weights of the tokens' own version, in nats:

    n / 2 * log(sum of (engine - now)^2 / sum of (engine - hypothesis)^2)

so that a fault far below the noise of one token shows in many tokens, and few tokens show little.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from consistency.hypotheses import RESIDUAL_BOUND
from consistency.score import Scorer, score_logprobs
from consistency.tokens import Floats, Sequences

# Rounding of a recorded float32 log-prob: a residual below it is 0.
ROUNDING = 1e-6
# A hypothesis gains so much by chance once in 200,000 times, whatever the noise.
LEAST_NATS = 10.0
# More tensors than this are first tried as layers.
MOST_TENSORS = 64

LAYER = re.compile(r"layers\.(\d+)\.")

Names = tuple[str, ...]


@dataclass(frozen=True)
class Fit:
    """A hypothesis: the nats that it gains, the mean |difference| that it leaves and explains."""

    name: str
    nats: float
    residual: float
    difference: float


@dataclass(frozen=True)
class StaleTensors:
    """The tensors of the engine, of `num_tensors`, that still have their values of before."""

    names: Names
    num_tensors: int
    fit: Fit

    def describe(self) -> str:
        """Name the first of them."""
        more = len(self.names) - 3
        return ", ".join(self.names[:3]) + (f" and {more} more" if more > 0 else "")


def squares(engine: Floats, predicted: Floats) -> float:
    """Sum of bounded squares of the difference, at least that of rounding."""
    size = np.minimum(np.abs(engine - predicted), RESIDUAL_BOUND)
    return float((size**2).sum() + len(size) * ROUNDING**2)


def nats_gained(engine: Floats, now: Floats, predicted: Floats) -> float:
    """Log-likelihood that a prediction gains over another one; all [n]."""
    return float(len(engine) / 2 * np.log(squares(engine, now) / squares(engine, predicted)))


def fit(name: str, engine: Floats, now: Floats, predicted: Floats) -> Fit:
    """Compare a hypothesis with the weights that should have sampled; all [n]."""
    residual, difference = mean_abs(engine - predicted), mean_abs(engine - now)
    return Fit(name, nats_gained(engine, now, predicted), residual, difference)


def mean_abs(difference: Floats) -> float:
    """Mean of bounded absolute values."""
    return float(np.minimum(np.abs(difference), RESIDUAL_BOUND).mean())


def find_stale_tensors(
    now: Scorer, before: Scorer, rows: Sequences, temperature: float
) -> StaleTensors | None:
    """Find the tensors whose old values explain the engine's log-probs; None if none do.

    The effects of single tensors are added up, beginning with the nearer of both versions: right
    for small updates. The set that is found is then scored as a whole.
    """
    engine = rows.engine_logprobs[rows.scored]
    names = tuple(name for name, _ in now.model.named_parameters())

    def logprobs(stale: Names) -> Floats:
        with swapped(now, before, stale):
            return score_logprobs(now, rows, temperature=temperature)

    base, old = logprobs(()), logprobs(names)
    is_nearer_old = squares(engine, old) < squares(engine, base)
    start = old if is_nearer_old else base

    def effect(group: Names) -> Floats:
        stale = tuple(name for name in names if name not in group) if is_nearer_old else group
        return logprobs(stale) - start

    groups: list[Names] = [(name,) for name in names]
    if len(groups) > MOST_TENSORS:
        layers = dict.fromkeys(map(module_of, names))
        groups = [tuple(name for name in names if module_of(name) == layer) for layer in layers]
    chosen = add_up(engine, start, {group: effect(group) for group in groups})
    if len(chosen) == 1 and len(chosen[0]) > 1:  # one layer: which of its tensors
        chosen = add_up(engine, start, {(name,): effect((name,)) for name in chosen[0]}) or chosen
    moved = {name for group in chosen for name in group}
    stale = tuple(name for name in names if (name in moved) != is_nearer_old)
    if not moved or not stale:
        return None
    found = fit("tensors of the version before", engine, base, logprobs(stale))
    return StaleTensors(stale, len(names), found)


def module_of(name: str) -> str:
    """Return the layer of a parameter, such as `layer 3`, or its module outside of layers."""
    inside = LAYER.search(name)
    return f"layer {inside[1]}" if inside else name.removeprefix("model.").removesuffix(".weight")


def vision_tensors(model: Any) -> Names:
    text = {id(parameter) for parameter in model.get_decoder().parameters()}
    text |= {id(parameter) for parameter in model.get_output_embeddings().parameters()}
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) not in text)


@contextmanager
def swapped(now: Scorer, before: Scorer, names: Names) -> Iterator[None]:
    """Give some tensors of a model the values of another one."""
    mine, theirs = (dict(scorer.model.named_parameters()) for scorer in (now, before))
    kept = {name: mine[name].data for name in names}
    for name in names:
        mine[name].data = theirs[name].data
    try:
        yield
    finally:
        for name, values in kept.items():
            mine[name].data = values


def add_up(engine: Floats, start: Floats, effects: dict[Names, Floats]) -> list[Names]:
    """Add the effect that explains most, until none explains more than chance; arrays [n]."""
    predicted = start
    chosen: list[Names] = []
    while left := [group for group in effects if group not in chosen]:
        best = min(left, key=lambda group: squares(engine, predicted + effects[group]))
        if nats_gained(engine, predicted, predicted + effects[best]) < LEAST_NATS:
            break
        predicted = predicted + effects[best]
        chosen.append(best)
    return chosen
