"""prime-rl: its default loss, with the log-probs of engine and trainer recorded and compared.

    [trainer.loss]
    type = "custom"
    import_path = "areal_debug.prime_rl.observed_default"

The loss function is called once per sequence, without the number of the step: a step ends with the
first optimizer step after it. Only references are kept until then.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from areal_debug.guarded import Guarded, rank_of_process
from consistency.measure import NOISE, Noise, k3
from recorder.errors import RecordError
from recorder.trainers.sample import Sample

# names of LossInputs -> names in a record; older versions have a teacher where newer ones have any
# reference
LEARNING = {
    "trainer_logprobs": "prox_logp",
    "ref_logprobs": "ref_logp",
    "teacher_logprobs": "teacher_logp",
    "advantages": "advantages",
    "loss_weights": "loss_weights",
}

LARGEST_STEP = 2**26  # tokens of a rank, about 1 GiB


def observed_default(inputs: Any, *, noise: str = "bfloat16", first_step: int = 0, **options: Any) -> Any:
    """Return what prime-rl's `default_loss_fn` returns, and observe its inputs.

    Args:
        inputs: prime-rl's LossInputs, [T] each.
        noise: which difference of log-probs is normal: a name in NOISE, such as "float8".
        first_step: number of the first step; not 0 for a resumed run.
        options: of prime-rl's default loss, such as `kl_tau`.
    """
    outputs = default_loss(tuple(sorted(options.items())))(inputs)
    observation(noise, first_step).add(inputs)
    return outputs


@functools.cache
def default_loss(options: tuple[tuple[str, Any], ...]) -> Callable[[Any], Any]:
    from prime_rl.trainer.rl import loss

    config = signature(loss.default_loss_fn).parameters["loss_config"].annotation(**dict(options))
    return lambda inputs: loss.default_loss_fn(inputs, config)


@functools.cache
def observation(noise: str, first_step: int) -> "Observation":
    """Return the observation of this process. Raises RecordError for an unknown noise."""
    if noise not in NOISE:
        raise RecordError(f"noise is {noise!r}: give one of {', '.join(NOISE)}")
    observed = Observation(Guarded("prime-rl", rank=rank_of_process()), NOISE[noise], first_step)
    register_optimizer_step_post_hook(lambda *_: observed.end_step())
    return observed


@dataclass
class Observation:
    """The inputs to the loss of the step in progress, [T] tensors by name for each sequence."""

    recording: Guarded
    noise: Noise
    step: int
    rows: list[dict[str, Tensor]] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, inputs: Any) -> None:
        """Keep the inputs of a sequence until the step ends."""
        self.recording.attempt(f"step {self.step}", lambda: self.keep(inputs))

    def keep(self, inputs: Any) -> None:
        """Keep references. Raises RecordError if no optimizer of torch ends the step."""
        names = ("loss_mask", "inference_logprobs", *LEARNING)
        values = {name: getattr(inputs, name, None) for name in names}
        self.rows.append({name: value.detach() for name, value in values.items() if value is not None})
        self.num_tokens += len(inputs.loss_mask)
        if self.num_tokens > LARGEST_STEP:
            self.rows = []
            raise RecordError(f"no step of a torch optimizer ended these {self.num_tokens} tokens")

    def end_step(self) -> None:
        """Compare and record the sequences of the step; does nothing without any."""
        if not self.rows:
            return
        rows, self.rows, self.num_tokens = self.rows, [], 0
        stats: dict[str, float] = {}

        def samples() -> list[Sample]:
            sequences = [row for row in to_numpy(rows) if row["loss_mask"].any()]
            stats.update(self.compare(sequences))
            return [sample_of(row) for row in sequences]

        self.recording.step(self.step, samples, stats=stats)
        self.step += 1

    def compare(self, sequences: list[dict[str, np.ndarray]]) -> dict[str, float]:
        """Return the mismatch of the step; print a sentence if it is not normal."""
        difference = np.concatenate(
            [
                (row["trainer_logprobs"] - row["inference_logprobs"])[row["loss_mask"]].astype(np.float64)
                for row in sequences
            ]
            or [np.zeros(0)]
        )
        finite = difference[np.isfinite(difference)]
        size, count = np.abs(finite), max(len(finite), 1)
        stats = {
            "mismatch/max_abs": float(size.max(initial=0.0)),
            "mismatch/mean_abs": float(size.sum() / count),
            "mismatch/k3": float(k3(finite).sum() / count),
            "mismatch/share_above_ln2": float((size > np.log(2.0)).sum() / count),
            "mismatch/not_finite": float(len(difference) - len(finite)),
        }
        maximum, mean, k3_mean, share, not_finite = stats.values()
        if mean > self.noise.mean_abs or k3_mean > self.noise.k3 or not_finite:
            self.recording.notice(
                f"step {self.step}: engine and trainer differ by mean |D| {mean:.2g} (normal for "
                f"{self.noise.name}: {self.noise.mean_abs:g}), k3 {k3_mean:.2g} ({self.noise.k3:g}), "
                f"max |D| {maximum:.2g}; {share:.2%} of {len(finite)} tokens beyond ln 2, {not_finite:.0f} not finite"
            )
        return stats


def to_numpy(rows: list[dict[str, Tensor]]) -> list[dict[str, np.ndarray]]:
    """Copy the tensors to the host, in one transfer per name."""
    result: list[dict[str, np.ndarray]] = [{} for _ in rows]
    for name in {name for row in rows for name in row}:
        having = [number for number, row in enumerate(rows) if name in row]
        tensors = [rows[number][name] for number in having]
        joined = torch.cat(tensors)
        values = (joined if joined.dtype == torch.bool else joined.float()).cpu().numpy()
        ends = np.cumsum([len(tensor) for tensor in tensors])
        for number, array in zip(having, np.split(values, ends[:-1]), strict=True):
            result[number][name] = array
    return result


def sample_of(row: dict[str, np.ndarray]) -> Sample:
    """Return the sequence as a sample: a loss function sees no token, reward, group or version."""
    return Sample(
        tokens=None,
        loss_mask=row["loss_mask"].astype(np.int32),
        logprobs=row["inference_logprobs"],
        learning={name: row[member] for member, name in LEARNING.items() if member in row},
    )
