"""Record every step of SkyRL: `callbacks=[areal_debug.skyrl.Record("runs/r")]` of its trainers.

At the end of a step, the batch of SkyRL has no rewards and no groups any more, and its advantages
are those of the loss, divided by its number of tokens. So the callback also looks at what two
methods of the trainer return. docs/trainers/skyrl.md says what is recorded.
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_debug.guarded import Guarded
from recorder.trainers.sample import FINISH_REASONS, as_numpy

if TYPE_CHECKING:
    TrainingCallback = object
else:
    try:
        from skyrl.train.utils.callbacks import TrainingCallback
    except ImportError:  # SkyRL calls an event by its name: nothing needs its class
        TrainingCallback = object

# inputs to the loss -> their names in a record
LEARNING = {
    "action_log_probs": "prox_logp",
    "base_action_log_probs": "ref_logp",
    "values": "values",
    "returns": "returns",
    "kl": "kl",
}
EXPERTS = "rollout_expert_indices"
DROPPED = ("rollout_sample_support", "pixel_values", "image_grid_thw")


class Record(TrainingCallback):
    """A TrainingCallback of SkyRL that records every step.

    The first failure of the recording is one sentence on stderr; the run continues without it.

    Args:
        folder: of the record; None: AREAL_DEBUG_RECORD names it. A record in it is continued.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = folder
        self.recorder: Guarded | None = None
        self.generated: dict[str, Sequence[Any]] = {}  # of the step, by name, a value per row
        self.advantages: Any = None  # of the step, before the loss divides them

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return nothing to do for an event that is not needed."""
        if name.startswith("on_"):
            return lambda *_: None
        raise AttributeError(name)

    def on_train_start(self, trainer: Any, callback_input: Any, control: Any) -> None:
        self.recorder = Guarded("skyrl", self.folder, tokenizer=getattr(trainer, "tokenizer", None))
        for name, take in (
            ("convert_to_training_input", self._take_generated),
            ("compute_advantages_and_returns", self._take_advantages),
        ):
            if hasattr(trainer, name):
                setattr(trainer, name, observed(getattr(trainer, name), self.recorder, take))

    def _take_generated(self, batch: Any, generator_output: Mapping[str, Any], uids: Sequence[Any]) -> None:
        self.generated = {"uid": list(uids), "stop_reason": list(generator_output.get("stop_reasons") or ())}
        if batch.get("rewards") is not None:
            self.generated["reward"] = batch["rewards"].sum(-1).tolist()

    def _take_advantages(self, batch: Any, data: Any) -> None:
        self.advantages = batch["advantages"]

    def on_step_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        if self.recorder is None:  # the callback was added during the run
            self.on_train_start(trainer, callback_input, control)
        assert self.recorder is not None
        self.recorder.attempt("a step", lambda: self._record(trainer, callback_input))

    def _record(self, trainer: Any, callback_input: Any) -> None:
        """Record the step, with what was kept of it."""
        assert self.recorder is not None
        batch, step = callback_input.batch, callback_input.global_step
        generated, advantages = self.generated, self.advantages
        self.generated, self.advantages = {}, None
        self.recorder.step(
            step,
            lambda: samples_of(batch, advantages, generated),
            not_recorded=[name for name in DROPPED if batch.get(name) is not None],
            config=getattr(trainer, "cfg", None),
            version=step,
            stats=getattr(trainer, "all_metrics", None) or callback_input.metrics,
        )

    def on_train_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        if self.recorder is not None:
            self.recorder.end()


def observed(method: Callable[..., Any], recorder: Guarded, take: Callable[..., None]) -> Callable[..., Any]:
    """Return the method, which gives its result and its arguments to `take` as well."""

    @functools.wraps(method)
    def observed_method(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        recorder.attempt(method.__name__, lambda: take(result, *args, **kwargs))
        return result

    return observed_method


def samples_of(batch: Any, advantages: Any, generated: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return samples as `recorder.trainers.sample.parse_sample` takes them.

    Args:
        batch: TrainingInputBatch: sequences are padded on the left, and what belongs to responses
            covers the last columns. Its last `pad_size` rows are copies.
        advantages: [B, R], None if unknown.
        generated: rewards, groups and stop reasons by row.
    """
    kept = to_numpy(batch["attention_mask"]) != 0
    sequences, given = to_numpy(batch["sequences"]), {**batch, "advantages": advantages}
    names = ("loss_mask", "response_mask", "rollout_logprobs", "advantages", *LEARNING)
    columns = {name: to_numpy(given[name]) for name in names if given.get(name) is not None}

    def sample_of(row: int) -> dict[str, Any]:
        tokens = sequences[row][kept[row]]
        width = min(len(tokens), columns["loss_mask"].shape[1])
        if "response_mask" in columns:
            width = int(columns["response_mask"][row].sum())
        values = {name: last(column[row], width, len(tokens)) for name, column in columns.items()}
        known = {name: column[row] for name, column in generated.items() if row < len(column)}
        reason = str(known.get("stop_reason")).lower()
        return {
            "tokens": tokens,
            "prompt_length": len(tokens) - width if "response_mask" in columns else None,
            "loss_mask": values["loss_mask"],
            "logprobs": values.get("rollout_logprobs"),
            "reward": known.get("reward"),
            "group": known.get("uid"),
            "finish_reason": reason if reason in FINISH_REASONS else None,
            "learning": {
                LEARNING.get(name, name): values[name] for name in ("advantages", *LEARNING) if name in values
            },
            "extras": experts_of(batch, row, kept[row]),
        }

    num_rows = len(sequences) - (batch.metadata or {}).get("pad_size", 0)
    return [sample_of(row) for row in range(num_rows)]


def to_numpy(tensor: Any) -> np.ndarray:
    return as_numpy(tensor, "the batch")


def last(values: np.ndarray, width: int, size: int) -> np.ndarray:
    """Return [size] values, the last `width` of those given behind zeros."""
    return np.concatenate([np.zeros(size - width, values.dtype), values[len(values) - width :]])


def experts_of(batch: Any, row: int, kept: np.ndarray) -> dict[str, np.ndarray]:
    """Return the routed experts of a row, [T, layers, k], -1 where there are none."""
    experts, absent = batch.get(EXPERTS), batch.get("router_padding_mask")
    if experts is None:
        return {}
    values = to_numpy(experts[row]).astype(np.int16)
    values = values if len(values) == kept.sum() else values[kept]
    if absent is not None:
        values[to_numpy(absent[row])[kept]] = -1
    return {"routed_experts": values}
