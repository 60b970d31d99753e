"""Cross-checks of the same tokens: repeated scoring by engine and model, and the trainer's path.

Rescoring compares A, the engine when sampling, B, its prefill, and C, the model. A difference of A
and B is a fault of decoding in the engine; one of B and C is a fault of its weights, sampling
transform or numerics. B is repeated: the difference of two Bs is the engine's run-to-run
variation, the noise floor of any comparison (the experiment of miles, docs/en/advanced, 2026).

The trainer check compares both with recorded logprobs of the trainer's packed and sharded path (for
a live engine, `entry.exact` computes them). A difference of engine and Hugging Face is the engine's fault only if the
trainer agrees with Hugging Face; otherwise it is the trainer's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from consistency.engines import MAX_CONCURRENT, Pictures, Server, call_all
from consistency.score import Scorer, score_logprobs
from consistency.tokens import Floats, Sequences

NOISE_FACTOR = 2.0  # both sides of a comparison round: twice one side's noise is still noise


@dataclass(frozen=True)
class Rescoring:
    """Mean |difference| over the same tokens.

    `decode` (A - B) is None unless A was sampled at temperature 1, which is that of B.
    """

    num_tokens: int
    decode: float | None
    prefill: float
    engine_repeat: float
    model_alone: float


def rescore(engines: Sequence[Server], scorer: Scorer, rows: Sequences, temperature: float) -> Rescoring:
    """Score rows twice by the engines that sampled them (`rows.worker`) and by the model, packed and alone.

    Raises:
        EngineError: an engine does not score prompts.
    """
    bounds = [rows.row(row) for row in range(rows.num_rows)]
    ids = [rows.input_ids[bound].tolist() for bound in bounds]
    num_prompts = [int((~rows.sampled[bound]).sum()) for bound in bounds]
    workers = [0] * rows.num_rows if rows.worker is None else rows.worker.tolist()
    seen = pictures_of(scorer, rows)
    calls = [
        partial(engines[worker].rescore, *asked)
        for worker, *asked in zip(workers, ids, num_prompts, seen, strict=True)
    ]
    limit = MAX_CONCURRENT * len(engines)
    first, second = (
        np.concatenate([np.array(row) for row in call_all(calls, limit, lambda _: None)]) for _ in range(2)
    )
    model = score_logprobs(scorer, rows)
    alone = score_logprobs(scorer, rows, tokens_per_pass=1)  # each row in a pass of its own
    sampled = rows.engine_logprobs[rows.scored]
    return Rescoring(
        num_tokens=len(model),
        decode=mean_distance(sampled, first) if temperature == 1.0 else None,
        prefill=mean_distance(first, model),
        engine_repeat=mean_distance(first, second),
        model_alone=mean_distance(model, alone),
    )


def pictures_of(scorer: Scorer, rows: Sequences) -> list[Pictures | None]:
    """Return the images that a request for each row carries."""
    if rows.images is None or scorer.processor is None:
        return [None] * rows.num_rows
    placeholder = scorer.processor.image_token_id
    return [Pictures(images, placeholder) if images else None for images in rows.images]


def mean_distance(left: Floats, right: Floats) -> float:
    both = np.isfinite(left) & np.isfinite(right)
    return float(np.abs(left[both] - right[both]).mean()) if both.any() else float("nan")


@dataclass(frozen=True)
class TrainerCheck:
    """Mean |difference| over `num_tokens`.

    `explanation` is the replayed hypothesis that gives the trainer's logprobs, "" without one;
    `rounding`, what another dtype changes, where that of the trainer is not known.
    """

    num_tokens: int
    engine_trainer: float
    trainer_model: float
    engine_model: float
    explanation: str = ""
    rounding: float = 0.0

    def is_at_fault(self, level: float) -> bool:
        """Return whether the trainer is farther from the model than noise and than the engine."""
        return self.trainer_model > NOISE_FACTOR * max(level, self.engine_model, self.rounding)

    def is_of_other_model(self, level: float) -> bool:
        """Return whether trainer and engine agree, and the model is far from both."""
        far = min(self.trainer_model, self.engine_model)
        return far > NOISE_FACTOR * max(level, self.engine_trainer)


def compare_trainer(engine: Floats, trainer: Floats, model: Floats) -> TrainerCheck | None:
    """Compare three columns of logprobs, float64 [n], where all are finite.

    None if none is, or if the trainer took over those of the engine.
    """
    usable = np.isfinite(engine) & np.isfinite(trainer) & np.isfinite(model) & (engine <= 0)
    if (engine == trainer)[usable].all():
        return None
    engine, trainer, model = engine[usable], trainer[usable], model[usable]
    return TrainerCheck(
        num_tokens=len(engine),
        engine_trainer=mean_distance(engine, trainer),
        trainer_model=mean_distance(trainer, model),
        engine_model=mean_distance(engine, model),
    )
