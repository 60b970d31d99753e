"""prime-rl: its default loss, with the log-probs of engine and trainer recorded and compared.

[trainer.loss]
type = "custom"
import_path = "areal_debug.prime_rl.observed_default"
"""

import functools
from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np
from torch.optim.optimizer import register_optimizer_step_post_hook

from consistency.measure import NOISE, Noise, k3
from recorder.errors import RecordError
from recorder.trainers.guarded import Guarded, rank_of_process
from recorder.trainers.prime_rl import Observation, Row


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
def observation(noise: str, first_step: int) -> Observation:
    """Return the observation of this process. Raises RecordError for an unknown noise."""
    if noise not in NOISE:
        raise RecordError(f"noise is {noise!r}: give one of {', '.join(NOISE)}")
    recording = Guarded("prime-rl", rank=rank_of_process())
    observed = Observation(
        recording, first_step, lambda step, rows: compare(step, rows, NOISE[noise], recording.notice)
    )
    register_optimizer_step_post_hook(lambda *_: observed.end_step())
    return observed


def compare(step: int, rows: list[Row], noise: Noise, notice: Callable[[str], None]) -> dict[str, float]:
    """Return the mismatch of a step; print a sentence if it is not normal."""
    trained = [
        (row["trainer_logprobs"] - row["inference_logprobs"])[row["loss_mask"]].astype(np.float64)
        for row in rows
    ]
    difference = np.concatenate(trained or [np.zeros(0)])
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
    if mean > noise.mean_abs or k3_mean > noise.k3 or not_finite:
        notice(
            f"step {step}: engine and trainer differ by mean |D| {mean:.2g} (normal for "
            f"{noise.name}: {noise.mean_abs:g}), k3 {k3_mean:.2g} ({noise.k3:g}), "
            f"max |D| {maximum:.2g}; {share:.2%} of {len(finite)} tokens beyond ln 2, {not_finite:.0f} not finite"
        )
    return stats
