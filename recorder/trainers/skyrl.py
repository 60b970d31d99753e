"""SkyRL: record every step by a callback of its trainers; import its dumps.

    callbacks=[areal_debug.skyrl.Record("runs/r")]

At the end of a step, the batch of SkyRL has no rewards and no groups any more, and its advantages
are those of the loss, divided by its number of tokens. So the callback also looks at what two
methods of the trainer return. docs/trainers/skyrl.md says what is recorded.

A dump is `global_step_{N}_training_input.pkl`, a pickled TrainingInputBatch. In either,
`loss_mask`, `rollout_logprobs` and others cover the last columns of `sequences`, the response; the
attention mask marks padding: before version 0.4 between prompt and response as well. The last
`pad_size` rows are copies with weight 0. The dump has advantages but no rewards.
"""

import functools
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from recorder.errors import ForeignFormat
from recorder.trainers.batches import unknown_value
from recorder.trainers.file_pictures import pictures_in
from recorder.trainers.foreign import (
    BY_PROMPT,
    NO_VERSIONS_OR_REASONS,
    NO_WEIGHTS,
    experts_of,
    member,
    optional,
    sequence_sample,
)
from recorder.trainers.guarded import Guarded
from recorder.trainers.sample import FINISH_REASONS, Sample, as_numpy
from recorder.trainers.stand_ins import Instance
from recorder.trainers.unpickle import load_bytes, load_pickle

FILES = r".*_training_input\.pkl"
NOTES = (NO_VERSIONS_OR_REASONS, NO_WEIGHTS)
REBUILD = "_rebuild_tensor_batch"
# inputs to the loss -> their names in a record
LEARNING = {
    "advantages": "advantages",
    "action_log_probs": "prox_logp",
    "base_action_log_probs": "ref_logp",
    "values": "values",
    "returns": "returns",
    "kl": "kl",
}
EXPERTS, ABSENT = "rollout_expert_indices", "router_padding_mask"  # true where the engine reported none
OF_ROWS = ("sequences", "attention_mask", "loss_mask", "response_mask", "rollout_logprobs", ABSENT, *LEARNING)
DROPPED = ("rollout_sample_support", "pixel_values", "image_grid_thw")


class Record:
    """A callback of SkyRL that records every step; SkyRL calls an event by its name.

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
            lambda: recorded_rows(batch, advantages, generated),
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


def recorded_rows(batch: Any, advantages: Any, generated: Mapping[str, Sequence[Any]]) -> list[Sample]:
    """Return the samples of a step.

    Args:
        batch: TrainingInputBatch. advantages: [B, R], None if unknown.
        generated: rewards, groups and stop reasons by row.
    """
    given = {**batch, "advantages": advantages}
    columns = {name: as_numpy(given[name], name) for name in OF_ROWS if given.get(name) is not None}
    columns["attention_mask"] = columns["attention_mask"] != 0
    if (response := columns.get("response_mask")) is not None:  # else the prompt may be in the last columns
        known = {name: columns[name] for name in ("rollout_logprobs", *LEARNING) if name in columns}
        columns |= {
            name: np.where(response, values, 0).astype(values.dtype) for name, values in known.items()
        }
    experts = batch.get(EXPERTS)

    def sample_of(row: int) -> Sample:
        known = {name: column[row] for name, column in generated.items() if row < len(column)}
        reason = str(known.get("stop_reason")).lower()
        return parse_row(
            columns
            if experts is None
            else columns | {EXPERTS: {row: as_numpy(experts[row], EXPERTS, np.int16)}},
            row,
            f"sample {row}",
            group=known.get("uid"),
            reward=known.get("reward"),
            finish_reason=FINISH_REASONS.get(reason),
        )

    num_rows = len(columns["sequences"]) - (batch.metadata or {}).get("pad_size", 0)
    return [sample_of(row) for row in range(num_rows)]


def read_batch(file: Path, notes: list[str]) -> list[Sample]:
    """Read the rows of a file; add to the notes what they lack. Raises ForeignFormat, UnsafePickle."""
    state = state_of(load_pickle(file), str(file))
    metadata, packed = optional(state, "metadata", {}), member(state, "batch_dict", str(file))
    lists = {key: value["items"] for key, value in packed.items() if is_list(value)}
    batch = {
        key: tensor
        for key, value in packed.items()
        if key not in lists and (tensor := read_tensor(value, f"{file}, {key}")) is not None
    }
    num_rows = len(member(batch, "sequences", str(file))) - int(optional(metadata, "pad_size", 0))
    groups = groups_of(metadata, num_rows)
    notes += [BY_PROMPT] if groups is None else []
    return [
        replace(
            sample_of(batch, row, groups, f"{file}, row {row}"),
            **pictures_in(tensors_of_row(lists, row, f"{file}, row {row}"), None, notes),
        )
        for row in range(num_rows)
    ]


def sample_of(
    batch: Mapping[str, np.ndarray], row: int, groups: Sequence[Hashable] | None, where: str
) -> Sample:
    """Parse a row; without groups, rows with one prompt are one."""
    if groups is not None:
        return parse_row(batch, row, where, group=groups[row])
    sample = parse_row(batch, row, where)
    if sample.prompt_length is None or sample.tokens is None:
        return sample
    return replace(sample, group=sample.tokens[: sample.prompt_length].tobytes())


def is_list(value: Any) -> bool:
    """Return whether a member of a batch is a list of tensors, one a row, of any length."""
    return isinstance(value, dict) and isinstance(value.get("items"), list)


def tensors_of_row(lists: Mapping[str, Sequence[Any]], row: int, where: str) -> dict[str, Any]:
    tensors = {key: read_tensor(items[row], where) for key, items in lists.items() if row < len(items)}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None and tensor.size}


def state_of(document: Any, where: str) -> Mapping[str, Any]:
    """Return the state of the batch, which a function of SkyRL rebuilds."""
    if isinstance(document, Instance) and document.name.endswith(REBUILD):
        return document.arguments[1]
    if isinstance(document, Instance) and isinstance(document.state, dict) and "batch_dict" in document.state:
        return document.state
    raise ForeignFormat(f"{where} has no TrainingInputBatch")


def read_tensor(packed: Any, where: str) -> np.ndarray | None:
    """Read one tensor: NumPy bytes with dtype and shape, or the bytes of a `torch.save`."""
    if packed is None:
        return None
    if isinstance(packed, bytes) or packed.get("format") == "torch":
        tensor = load_bytes(packed if isinstance(packed, bytes) else packed["data"], where)
        return None if tensor is None else np.asarray(tensor)
    if packed.get("format", "numpy") != "numpy":
        raise ForeignFormat(f"{where} is of format {packed['format']!r}; numpy and torch are known")
    shape = [int(size) for size in packed["shape"]]
    return np.frombuffer(packed["data"], np.dtype(str(packed["dtype"]))).reshape(shape)


def groups_of(metadata: Mapping[str, Any], num_rows: int) -> list[Hashable] | None:
    """Return the group of each row, from the row ranges of prompts; None without them."""
    if "policy_prompt_boundaries" not in metadata:
        return None
    groups: list[Hashable] = [f"row {row}" for row in range(num_rows)]
    for number, (begin, end) in enumerate(optional(metadata, "policy_prompt_boundaries", [])):
        groups[int(begin) : min(int(end), num_rows)] = [number] * (min(int(end), num_rows) - int(begin))
    return groups


def parse_row(batch: Mapping[str, Any], row: int, where: str, **known: Any) -> Sample:
    """Parse one row, without its padding; `known` are further members of Sample."""
    kept = batch["attention_mask"][row].astype(bool)

    def column(key: str) -> Any:
        """Extend values of the last columns to all columns, with 0 in front."""
        if key not in batch:
            return None
        values = batch[key][row]
        return np.concatenate([np.zeros(len(kept) - len(values), values.dtype), values])[kept]

    tokens, response, experts = batch["sequences"][row][kept], column("response_mask"), None
    if response is not None and response.any():
        known["prompt_length"] = int((response != 0).argmax())
    else:
        known["prompt_length"] = None
    if EXPERTS in batch:
        experts = batch[EXPERTS][row]
        experts = experts.copy() if len(experts) == kept.sum() else experts[kept]
        if ABSENT in batch:
            experts[batch[ABSENT][row][kept].astype(bool)] = unknown_value(experts.dtype)
    return sequence_sample(
        tokens,
        column("loss_mask"),
        logprobs=column("rollout_logprobs"),
        learning={name: column(key) for key, name in LEARNING.items()},
        extras=experts_of(experts, len(tokens), where),
        where=where,
        **known,
    )
