"""One comparison of engine and model: its options, and its facts for the checks of causes.

A `Request` holds the options: the model that should have sampled, and further checkpoints. A `Case`
holds everything that a check may inspect.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from consistency.measure import NEGLIGIBLE, NOISE, Measurement, Noise
from consistency.rescoring import Rescoring, TrainerCheck
from consistency.score import Scores
from consistency.tensors import ChangedTensor
from consistency.tokens import Floats, Ints, Sequences, TokenTable
from consistency.transforms import RESIDUAL_BOUND, Prediction, Replays, likelihood, mean_square, residual_size

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# An explanation must leave less than 1 / MIN_GAIN of the difference; correct ones leave a fifth.
MIN_GAIN = 1.5
MIN_GAIN_OF_SQUARES = 3.0
# Of predictions within this ratio of the best, the first wins: simple transforms come first.
TIE_RATIO = 1.02
# Where logprobs are all near 0, another column of the model fits by chance; of other weights, the
# base is merely nearer.
EXACT = ("R09", "R32.base")
# Nats by which another transform must raise the likelihood of the samples. Fitting one number to
# noise gains about 1.
LIKELIER_NATS = 20.0
RARE_NATS = 12.0  # without a number: once in 160,000 checks by chance
LARGEST_SURPRISE = 3.0  # Z of tokens that the trainer's distribution drew
# A group of tokens is bad when its mean |D| is this many times that of the good ones.
BAD_RATIO = 3.0


@dataclass(frozen=True)
class Request:
    """Options of a comparison. Checkpoints are folders in Hugging Face format; None if not given.

    Attributes:
        model: checkpoint with the weights that should have sampled.
        dtype: of the model, "float32" or "bfloat16"; None: that of the trainer.
        device: of the model, such as "cpu" or "cuda".
        temperature: of the sampling; None: the recorded one.
        previous: checkpoint before this one, to recognise stale weights.
        base: checkpoint without the adapter, to recognise an engine that does not use it.
        is_shown: the model is known to have the weights that should have sampled.
    """

    model: str
    dtype: str | None = None
    device: str = "cpu"
    temperature: float | None = None
    previous: str | None = None
    base: str | None = None
    is_shown: bool = True


@dataclass(frozen=True)
class Setting:
    """Recorded sampling options, and what is known of engine and model."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    greedy: bool = False
    eos_token_id: int | None = None
    bos_token_id: int | None = None
    vocabulary_size: int = 0
    model_version: int | None = None
    noise: Noise = NOISE["bfloat16"]
    added_token_ids: frozenset[int] = frozenset()
    has_linear_attention: bool = False
    kv_cache_dtype: str | None = None
    has_experts: bool = False


@dataclass(frozen=True)
class Explanation:
    """A prediction, its residual mean |D|, and the factor by which it beats the trainer's."""

    prediction: Prediction
    residual: float
    gain: float


@dataclass(frozen=True)
class Case:
    """One comparison.

    `replays` is None without full logits, `rescoring` without a live engine, `trainer_check`
    without logprobs of the trainer's own path, `changed_tensor` unless one was found.
    """

    sequences: Sequences
    table: TokenTable
    scores: Scores
    measurement: Measurement
    setting: Setting
    replays: Replays | None
    rescoring: Rescoring | None = None
    trainer_check: TrainerCheck | None = None
    changed_tensor: ChangedTensor | None = None

    @property
    def level(self) -> float:
        """The largest healthy mean |D| of this precision."""
        return self.setting.noise.mean_abs

    @property
    def mean_abs(self) -> float:
        """Mean |D|."""
        return self.measurement.metrics["mean_abs"]

    @property
    def is_of_flips(self) -> bool:
        """Whether experts chosen otherwise, few and large, leave mean |D| within its error of the level."""
        error = LARGEST_SURPRISE * self.measurement.metrics["rmse"] / self.measurement.num_tokens**0.5
        return self.setting.has_experts and self.mean_abs <= self.level + error

    @cached_property
    def explanation(self) -> Explanation | None:
        return None if self.replays is None else explain(self.replays, self.level)

    @cached_property
    def drawn_by(self) -> tuple[Prediction, float] | None:
        """The transform that drew the tokens, clearly likelier than the trainer, and its nats."""
        if self.replays is None or self.setting.greedy:
            return None
        found = likeliest(self.replays)
        least = RARE_NATS if found is not None and found[0].cause == "R06" else LIKELIER_NATS
        return found if found is not None and found[1] > least else None

    @cached_property
    def unexplained(self) -> bool:
        """True if other tokens than zeros differ by more than noise, and no replay explains it."""
        size = np.where(self.table.engine != 0.0, np.abs(self.table.difference), 0.0)
        return bool(size.mean() > self.level) and self.explanation is None

    def surprise(self, places: Ints | slice = slice(None)) -> float:
        """Z score of the surprisal of tokens under the trainer; 0 +- 1 if its distribution drew them."""
        logprob, entropy, variance = (
            column[places] for column in (self.scores.logprob, self.scores.entropy, self.scores.variance)
        )
        usable = np.isfinite(logprob) & np.isfinite(entropy)
        expected = (-logprob - entropy)[usable].sum()
        return float(expected / np.sqrt(max(variance[usable].sum(), 1e-12)))


def explain(replays: Replays, level: float) -> Explanation | None:
    """Return the explanation of the reported logprobs, if there is one.

    It is judged by the typical token, else by all squares, which detects faults of few tokens.
    """
    if np.mean(np.abs(replays.engine - replays.base)) < NEGLIGIBLE:
        return None
    by_median = best_explanation(replays, residual_size, MIN_GAIN, level)
    return by_median or best_explanation(replays, mean_square, MIN_GAIN_OF_SQUARES, level)


def likeliest(replays: Replays) -> tuple[Prediction, float] | None:
    """Return the transform under which the tokens are likeliest, and the nats that it gains."""
    # Temperature, truncation, penalties, forbidden EOS.
    tried = [p for p in replays.predictions if p.cause in ("R01", "R03", "R05", "R06", "R06.tokens")]
    gains = [likelihood(replays.base, p.logprobs) for p in tried]
    best = int(np.argmax(gains)) if gains else -1
    return (tried[best], gains[best]) if gains else None


def best_explanation(
    replays: Replays, miss: Callable[[Floats, Floats], float], gain: float, level: float
) -> Explanation | None:
    """Return the first of the best predictions, if it misses `gain` times less than the trainer.

    Its residual must be noise, mean |D| <= 2 `level`, or a fifth of the difference: a prediction
    that explains half of it fits many faults.
    """
    engine, base = replays.engine, replays.base
    misses = [miss(engine, p.logprobs) for p in replays.predictions]
    best, as_is = min(misses), miss(engine, base)
    first = next(i for i, value in enumerate(misses) if value <= best * TIE_RATIO)
    prediction = replays.predictions[first]
    left = float(np.minimum(np.abs(engine - prediction.logprobs), RESIDUAL_BOUND).mean())
    share = 0.0 if prediction.cause in EXACT else 0.2
    if best * gain > as_is or left > max(2 * level, share * float(np.abs(engine - base).mean())):
        return None
    return Explanation(prediction, left, as_is / max(misses[first], 1e-12))
