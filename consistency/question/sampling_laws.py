"""Sampling options that an engine may have used instead of those of the config.

`case.explain` judges the reported log-probs, and `case.likeliest` the likelihood of the tokens. The
embedded engine allows a third criterion: its random numbers follow from the run's seed, so that the
tokens that it draws under given options are known one by one.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from areal_core.embedded.engine import row_seed
from areal_core.embedded.generate import draw, draw_uniforms
from areal_core.rollout.types import TOP_K_OFF, ModelRequest
from areal_core.rollout.types import Sampling as RequestSampling
from consistency.hypotheses import select_rows, spread_rows, tokens_within
from consistency.score import TOKENS_PER_PASS, Scorer, predictors
from consistency.tokens import Ints, Sequences

# The share of tokens that the right options draw again: rounding at the bounds of a token's share
# of [0, 1) changes some.
DRAWN_AGAIN = 0.97
LOGITS_TO_DRAW = 1 << 21
TOP_P = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
TOP_K = (1, 2, 3, 5, 8, 10, 20, 30, 40, 50, 64, 80, 100, 200)
TEMPERATURE = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0)
POINTS = 9  # between two neighbours of a grid


@dataclass(frozen=True)
class Law:
    """Options of sampling; `top_k` is None for no limit."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    greedy: bool = False

    def differences(self, config: "Law") -> str:
        """Describe what differs from the config."""
        return ", ".join(
            f"{name} {describe(value)} (config: {describe(getattr(config, name))})"
            for name, value in vars(self).items()
            if value != getattr(config, name)
        )


def describe(value: float | int | bool | None) -> str:
    """Write the value of an option."""
    return "no limit" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Draws:
    """Tokens of an embedded engine with what drew them: logits [n, vocab], float64 uniforms [n]."""

    logits: torch.Tensor
    tokens: torch.Tensor
    uniforms: torch.Tensor

    def share(self, law: Law) -> float:
        """Share of the tokens that the law draws again."""
        if law.greedy:
            return float((self.logits.argmax(1) == self.tokens).double().mean())
        probs = (self.logits / law.temperature).log_softmax(-1).exp()
        top_k = torch.full((len(probs),), TOP_K_OFF if law.top_k is None else law.top_k)
        drawn = draw(probs, self.uniforms, top_k, torch.full((len(probs),), law.top_p))
        return float((drawn == self.tokens).double().mean())


def draws_of(scorer: Scorer, sequences: Sequences, sample_ids: Ints, seed: int) -> Draws:
    """Compute the logits of some rows, and the random numbers that drew their tokens.

    Args:
        sequences: of one version of the weights, that of the scorer.
        sample_ids: per row, int64 [rows].
        seed: of the run.
    """
    rows = spread_rows(sequences, tokens_within(LOGITS_TO_DRAW, scorer.head.vocabulary_size))
    picked = select_rows(sequences, rows)
    logits = torch.empty(len(picked.scored), scorer.head.vocabulary_size)
    for places, hidden, _, _ in predictors(scorer, picked, TOKENS_PER_PASS):
        logits[torch.as_tensor(places)] = scorer.head.cap(scorer.head.uncapped(hidden)).float().cpu()
    assert sequences.prompt_id is not None
    assert sequences.versions is not None
    version = int(sequences.versions[sequences.scored[0]])
    uniforms = [
        value
        for row, place in enumerate(rows)
        for value in uniforms_of_row(
            picked.sampled[picked.row(row)],
            seed,
            version,
            {"prompt_id": int(sequences.prompt_id[place]), "sample_id": int(sample_ids[place])},
        )
    ]
    tokens = torch.as_tensor(picked.input_ids[picked.scored])
    return Draws(logits, tokens, torch.tensor(uniforms, dtype=torch.float64))


def uniforms_of_row(sampled: np.ndarray, seed: int, version: int, name: dict[str, int]) -> Iterator[float]:
    """Yield the random number of each sampled token; a turn is a span of sampled tokens."""
    spans = [len(list(group)) for is_sampled, group in itertools.groupby(sampled) if is_sampled]
    for turn, length in enumerate(spans):
        request = ModelRequest(input_ids=[], sampling=RequestSampling(), metadata=name | {"turn": turn})
        yield from draw_uniforms(row_seed(seed, version, request), length).tolist()


def find_law(draws: Draws, config: Law) -> tuple[Law, float]:
    """Return the options that draw the most tokens again, one of them other than in the config."""
    tried = {law: draws.share(law) for law in (config, replace(config, greedy=not config.greedy))}
    for name, grid in (("top_p", TOP_P), ("top_k", TOP_K), ("temperature", TEMPERATURE)):

        def share(value: float, name: str = name) -> float:
            return draws.share(Law(**(vars(config) | {name: value})))

        shares = {value: share(value) for value in grid}
        best = max(shares, key=lambda value: shares[value])
        shares |= {value: share(value) for value in between(grid, best, whole=name == "top_k")}
        # Of equals, the roundest number: the options draw the same tokens in a range.
        value = max(shares, key=lambda value: (shares[value], -len(f"{value:.6g}")))
        tried[Law(**(vars(config) | {name: value}))] = shares[value]
    law = max(tried, key=lambda law: tried[law])
    return law, tried[law]


def between(grid: Sequence[float], best: float, whole: bool) -> list[float]:
    """Points between a point of the grid and its neighbours."""
    at = list(grid).index(best)
    low, high = grid[max(at - 1, 0)], grid[min(at + 1, len(grid) - 1)]
    points = np.concatenate([np.linspace(low, best, POINTS + 2), np.linspace(best, high, POINTS + 2)])
    return sorted({round(p) if whole else round(p, 4) for p in points.tolist()} - {best})
