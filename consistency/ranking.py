"""Compare token ranks: how often both sides differ on the most likely token, near ties or not."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from consistency.engine.reply import Top
from consistency.score import Scores

# Nats between the model's first and second token above which another first token is not a near tie.
CLEAR_NATS = 0.5


@dataclass(frozen=True)
class Ranking:
    """Ranks over the `num_tokens` tokens that the model scored in detail.

    `argmax_share` is the share of sampled tokens that are the model's most likely; `highest_rank`,
    `most_mass_before` and `least_relative` (probability relative to the most likely token) identify
    top-k, top-p and min-p. The rest is None unless the engine reported its most likely tokens: the
    share of tokens whose first choice differs, the same where the model's choice is clear, and the
    mean Jaccard index of both sides' tokens.
    """

    num_tokens: int
    argmax_share: float
    highest_rank: int
    most_mass_before: float
    least_relative: float
    argmax_mismatch: float | None = None
    clear_mismatch: float | None = None
    jaccard: float | None = None


def rank_tokens(scores: Scores, tops: Sequence[Top] | None) -> Ranking | None:
    """Compute the ranking; None if no token was scored in detail."""
    detailed = np.flatnonzero((scores.rank >= 0) & np.isfinite(scores.logprob))
    if not len(detailed):
        return None
    comparison = {} if tops is None else compare_tops(scores, detailed.tolist(), tops)
    return Ranking(
        num_tokens=len(detailed),
        argmax_share=float((scores.rank[detailed] == 0).mean()),
        highest_rank=int(scores.rank[detailed].max()),
        most_mass_before=float(scores.mass_before[detailed].max()),
        least_relative=float(np.exp((scores.logprob - scores.largest)[detailed].min())),
        **comparison,
    )


def compare_tops(scores: Scores, detailed: Sequence[int], tops: Sequence[Top]) -> dict[str, float]:
    """Compare with the engine's most likely tokens."""
    compared = [index for index in detailed if tops[index]]
    if not compared:
        return {}
    differs = np.array([most_likely(tops[index]) != scores.top_ids[index, 0] for index in compared])
    gap = scores.top_logprobs[compared, 0] - scores.top_logprobs[compared, 1]
    clear = gap > CLEAR_NATS
    return {
        "argmax_mismatch": float(differs.mean()),
        "clear_mismatch": float(differs[clear].mean()) if clear.any() else 0.0,
        "jaccard": float(
            np.mean([overlap({i for i, _ in tops[at]}, set(scores.top_ids[at].tolist())) for at in compared])
        ),
    }


def most_likely(top: Top) -> int:
    """Return the id of the largest logprob."""
    return max(top, key=lambda pair: pair[1])[0]


def overlap(left: set[int], right: set[int]) -> float:
    """Return the Jaccard index of two sets."""
    return len(left & right) / len(left | right)
