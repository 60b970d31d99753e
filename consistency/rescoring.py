"""The same tokens asked twice: A as the engine told them when it sampled, B as it scores them now, C as the model does, each repeated.

Where A and B differ, decoding in the engine is to blame; where B and C differ, its weights, law or numerics; what differs from B to
B again is the engine's own noise, and no comparison can be finer (the experiment is that of miles, docs/en/advanced, 2026).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from consistency.engine.ask import rescore_all
from consistency.engine.reply import Engine
from consistency.score import Scorer, score
from consistency.tokens import Floats, Sequences

# Rows are scored alone as well as packed, which shows whether the model's numbers depend on their neighbours.
ALONE = 1


@dataclass(frozen=True)
class Rescoring:
    """Mean |difference| over the same tokens. `decode` (A - B) is None where A is under another temperature than B's, which is 1."""

    num_tokens: int
    decode: float | None
    prefill: float
    engine_repeat: float
    model_repeat: float
    model_alone: float


async def rescore(
    engines: Sequence[Engine], scorer: Scorer, rows: Sequences, temperature: float
) -> Rescoring:
    """Ask the engines and the model twice each about rows that the engines sampled (`rows.worker` tells which).

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
    told = rows.engine_logprobs[rows.scored]
    return Rescoring(
        num_tokens=len(model),
        decode=mean_distance(told, first) if temperature == 1.0 else None,
        prefill=mean_distance(first, model),
        engine_repeat=mean_distance(first, second),
        model_repeat=mean_distance(model, again),
        model_alone=mean_distance(model, alone),
    )


def mean_distance(left: Floats, right: Floats) -> float:
    """Mean |left - right| of what is finite on both sides; NaN when nothing is."""
    both = np.isfinite(left) & np.isfinite(right)
    return float(np.abs(left[both] - right[both]).mean()) if both.any() else float("nan")
