"""slime and miles: `--custom-rollout-log-function-path areal_debug.slime.record`.

The folder is named by AREAL_DEBUG_RECORD. The function is called by the rollout manager, which is
one process, once per rollout, with the samples that are trained on next.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from areal_debug.guarded import Guarded
from recorder.trainers.batches import unknown_value
from recorder.trainers.recorder import to_number
from recorder.trainers.sample import as_numpy

FINISH_REASONS = {"completed": "stop", "truncated": "length", "aborted": "abort", "failed": "abort"}
# [T - 1, layers, k]: the last token was never an input
PER_INPUT = {"rollout_routed_experts": "routed_experts", "rollout_indexer_topk": "indexer_topk"}
NOT_RECORDED = ("multimodal_inputs", "multimodal_train_inputs", "rollout_top_p_token_ids", "opd_reverse_kl")


def record(
    rollout_id: int,
    args: Any,
    samples: Sequence[Any],
    rollout_extra_metrics: Mapping[str, Any] | None,
    rollout_time: float,
) -> bool:
    """Record the samples of a rollout; return False, which keeps the default log.

    `samples` are slime's or miles' `Sample`s, or nested lists of them; `args` is the namespace of
    the run.
    """
    rows = list(flat(samples))
    recording = recording_of("miles" if rows and type(rows[0]).__module__.startswith("miles") else "slime")
    recording.step(
        rollout_id,
        lambda: [parse_row(row, args.reward_key) for row in rows],
        not_recorded=[name for name in NOT_RECORDED if any(has(row, name) for row in rows)],
        config=args,
        stats={**(rollout_extra_metrics or {}), "rollout_time": rollout_time},
    )
    return False


@functools.cache
def recording_of(trainer: str) -> Guarded:
    return Guarded(trainer)


def flat(samples: Any) -> Iterator[Any]:
    """Yield the samples of nested lists."""
    for item in samples:
        yield from flat(item) if isinstance(item, list) else (item,)


def has(sample: Any, member: str) -> bool:
    """Return whether a sample has a value, which one of the two frameworks may not know."""
    return getattr(sample, member, None) is not None


def parse_row(sample: Any, reward_key: str | None) -> dict[str, Any]:
    """Return a sample as `Recorder.step` takes it. Raises RecordError."""
    size = sample.response_length
    named = isinstance(sample.reward, Mapping)
    rewards = sample.reward if named else {}
    return {
        "tokens": sample.tokens,
        "prompt_length": len(sample.tokens) - size,
        "loss_mask": np.zeros(size, np.int32) if sample.remove_sample else sample.loss_mask,
        "logprobs": sample.rollout_log_probs,
        "teacher_logprobs": getattr(sample, "teacher_log_probs", None),
        "reward": rewards.get(reward_key) if named else sample.reward,
        "scores": {name: to_number(value) for name, value in rewards.items()},
        "group": sample.group_index,
        "finish_reason": FINISH_REASONS.get(sample.status.value),
        "versions": version_of(sample.weight_versions),
        "prompt": sample.prompt if isinstance(sample.prompt, str) else str(sample.prompt),
        "completion": sample.response,
        "extras": extras_of(sample),
    }


def version_of(versions: Sequence[str]) -> int | None:
    """Return the weight version; None if the sample has several, because turns are not located."""
    found = {str(version) for version in versions}
    (version,) = found if len(found) == 1 else ("",)
    return int(version) if version.isdigit() else None


def extras_of(sample: Any) -> dict[str, np.ndarray]:
    """Return [T, layers, k] by name; the last token's values are unknown."""
    extras = {}
    for member, name in PER_INPUT.items():
        if has(sample, member):
            array = as_numpy(getattr(sample, member), member)
            missing = len(sample.tokens) - len(array)
            extras[name] = np.concatenate(
                [array, np.full((missing, *array.shape[1:]), unknown_value(array.dtype), array.dtype)]
            )
    return extras
