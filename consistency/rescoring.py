"""Score tokens again: A by the engine sampling, B by its prefill, C by the model.

A difference of A and B is a fault of decoding in the engine; one of B and C is a fault of its
weights, sampling transform or numerics. B and C are repeated: the difference of two Bs is the
engine's run-to-run variation, the noise floor of any comparison (the experiment of miles,
docs/en/advanced, 2026).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from consistency.engine.ask import rescore_all
from consistency.engine.reply import Engine
from consistency.score import Scorer, score
from consistency.tokens import Floats, Sequences

# Rows are scored alone as well as packed, to detect logprobs that depend on the batch.
ALONE = 1


@dataclass(frozen=True)
class Rescoring:
    """Mean |difference| over the same tokens.

    `decode` (A - B) is None unless A was sampled at temperature 1, which is that of B.
    """

    num_tokens: int
    decode: float | None
    prefill: float
    engine_repeat: float
    model_repeat: float
    model_alone: float


async def rescore(
    engines: Sequence[Engine], scorer: Scorer, rows: Sequences, temperature: float
) -> Rescoring:
    """Score rows twice by the engines that sampled them (`rows.worker`) and twice by the model.

    Raises:
        EngineError: an engine does not score prompts.
    """
    bounds = [rows.row(row) for row in range(rows.num_rows)]
    ids = [rows.input_ids[bound].tolist() for bound in bounds]
    num_prompts = [int((~rows.sampled[bound]).sum()) for bound in bounds]
    workers = [0] * rows.num_rows if rows.worker is None else rows.worker.tolist()
    first, second = [
        np.concatenate([np.array(row) for row in await rescore_all(engines, ids, num_prompts, workers)])
        for _ in range(2)
    ]
    model = score(scorer, rows, top_k=1).logprob
    again = score(scorer, rows, top_k=1).logprob
    alone = score(scorer, rows, top_k=1, tokens_per_pass=ALONE).logprob
    sampled = rows.engine_logprobs[rows.scored]
    return Rescoring(
        num_tokens=len(model),
        decode=mean_distance(sampled, first) if temperature == 1.0 else None,
        prefill=mean_distance(first, model),
        engine_repeat=mean_distance(first, second),
        model_repeat=mean_distance(model, again),
        model_alone=mean_distance(model, alone),
    )


def mean_distance(left: Floats, right: Floats) -> float:
    """Return mean |left - right| of values finite on both sides; NaN if there is none."""
    both = np.isfinite(left) & np.isfinite(right)
    return float(np.abs(left[both] - right[both]).mean()) if both.any() else float("nan")
