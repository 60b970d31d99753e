"""How both sides rank tokens: disagreement on which token is likeliest, where it was close and where it was not."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from consistency.engine.reply import Top
from consistency.score import Scores

# Nats between the model's first and second token from which another first token in the engine is no near tie.
CLEAR_NATS = 0.5


@dataclass(frozen=True)
class Ranking:
    """Over the `num_tokens` that the model was asked about in detail.

    `argmax_share` is the part of sampled tokens that are the model's likeliest; `highest_rank`, `most_mass_before` and
    `least_relative` (probability over that of the likeliest) are the fingerprints of top-k, top-p and min-p. The rest compares with
    the engine's likeliest tokens and is None where it did not tell them: the part whose first token differs, the same where the model's
    choice is clear, and the mean Jaccard index of both sides' tokens.
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
    """The ranking of scored tokens; None where the model was asked about none in detail."""
    asked = np.flatnonzero((scores.rank >= 0) & np.isfinite(scores.logprob))
    if not len(asked):
        return None
    told = {} if tops is None else against(scores, asked.tolist(), tops)
    return Ranking(
        num_tokens=len(asked),
        argmax_share=float((scores.rank[asked] == 0).mean()),
        highest_rank=int(scores.rank[asked].max()),
        most_mass_before=float(scores.mass_before[asked].max()),
        least_relative=float(np.exp((scores.logprob - scores.largest)[asked].min())),
        **told,
    )


def against(scores: Scores, asked: Sequence[int], tops: Sequence[Top]) -> dict[str, float]:
    """The comparison with the engine's likeliest tokens."""
    compared = [index for index in asked if tops[index]]
    if not compared:
        return {}
    differs = np.array([likeliest(tops[index]) != scores.top_ids[index, 0] for index in compared])
    gap = scores.top_logprobs[compared, 0] - scores.top_logprobs[compared, 1]
    clear = gap > CLEAR_NATS
    return {
        "argmax_mismatch": float(differs.mean()),
        "clear_mismatch": float(differs[clear].mean()) if clear.any() else 0.0,
        "jaccard": float(
            np.mean([overlap({i for i, _ in tops[at]}, set(scores.top_ids[at].tolist())) for at in compared])
        ),
    }


def likeliest(top: Top) -> int:
    """The id of the largest logprob."""
    return max(top, key=lambda pair: pair[1])[0]


def overlap(left: set[int], right: set[int]) -> float:
    """Jaccard index of as many of either as both have."""
    return len(left & right) / len(left | right)
