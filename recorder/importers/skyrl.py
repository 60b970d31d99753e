"""SkyRL: `global_step_{N}_training_input.pkl`, a pickled TrainingInputBatch.

Sequences are padded on the left; `loss_mask` and `rollout_logprobs` cover the last columns. The
last `pad_size` rows are copies with weight 0. The dump has advantages but no rewards.
"""

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recorder.errors import ForeignFormat
from recorder.importers.foreign import (
    Foreign,
    Step,
    as_tokens,
    files_in_order,
    full_sequence,
    member,
    optional,
)
from recorder.importers.stand_ins import Instance
from recorder.importers.unpickle import load_bytes, load_pickle
from recorder.trainers.sample import Sample

NOTES = (
    "rewards are not in the file: each sample's mean advantage is recorded as its reward; replay with actor.reward_norm=null "
    "and actor.adv_norm=null",
    "weight versions and finish reasons are not in the file",
    "weights and optimizer are not in the file: choose the model for a replay",
)
GROUPS_NOTE = "the file has no policy_prompt_boundaries: every sample is a group of its own"
REBUILD = "_rebuild_tensor_batch"


def recognises(path: Path) -> bool:
    """Return whether the path has files `*_training_input.pkl`."""
    files = files_of(path)
    return bool(files) and files[0].name.endswith("_training_input.pkl")


def files_of(path: Path) -> list[Path]:
    """The files of the steps, in order."""
    folder = path / "dumped_data" if (path / "dumped_data").is_dir() else path
    return files_in_order(folder, "*_training_input.pkl")


def read(path: Path) -> Foreign:
    """Read one step per file. Raises ForeignFormat, UnsafePickle."""
    steps, notes = [], list(NOTES)
    for file in files_of(path):
        state = state_of(load_pickle(file), str(file))
        metadata = optional(state, "metadata", {})
        batch = {
            key: read_tensor(value, f"{file}, {key}")
            for key, value in state["batch_dict"].items()
            if value is not None and value["format"] != "tensor_list"
        }
        num_rows = len(member(batch, "sequences", str(file))) - optional(metadata, "pad_size", 0)
        groups = groups_of(metadata, num_rows)
        notes += [] if "policy_prompt_boundaries" in metadata else [GROUPS_NOTE]
        steps.append(
            Step(file.stem, [parse_row(batch, row, groups[row], str(file)) for row in range(num_rows)])
        )
    return Foreign("skyrl", steps, list(dict.fromkeys(notes)))


def state_of(document: Any, where: str) -> Mapping[str, Any]:
    """Return the state of the batch, which a function of SkyRL rebuilds."""
    if isinstance(document, Instance) and document.name.endswith(REBUILD):
        return document.arguments[1]
    if isinstance(document, Instance) and isinstance(document.state, dict) and "batch_dict" in document.state:
        return document.state
    raise ForeignFormat(f"{where} has no TrainingInputBatch")


def read_tensor(packed: Mapping[str, Any], where: str) -> np.ndarray:
    """Read one tensor: NumPy bytes with dtype and shape, or the bytes of a `torch.save`."""
    if packed["format"] == "torch":
        return np.asarray(load_bytes(packed["data"], where))
    if packed["format"] != "numpy":
        raise ForeignFormat(f"{where} is of format {packed['format']!r}; numpy and torch are known")
    shape = [int(size) for size in packed["shape"]]
    return np.frombuffer(packed["data"], np.dtype(str(packed["dtype"]))).reshape(shape)


def groups_of(metadata: Mapping[str, Any], num_rows: int) -> list[Hashable]:
    """Return the group of each row, from the row ranges of prompts."""
    groups: list[Hashable] = [f"row {row}" for row in range(num_rows)]
    for number, (begin, end) in enumerate(optional(metadata, "policy_prompt_boundaries", [])):
        groups[int(begin) : min(int(end), num_rows)] = [number] * (min(int(end), num_rows) - int(begin))
    return groups


def parse_row(batch: Mapping[str, np.ndarray], row: int, group: Hashable, where: str) -> Sample:
    """Parse one row, without its padding."""
    kept = batch["attention_mask"][row].astype(bool)

    def all_columns(key: str) -> np.ndarray:
        """Extend values of the last columns to all columns, with 0 in front."""
        values = batch[key][row]
        return np.concatenate([np.zeros(len(kept) - len(values), values.dtype), values])[kept]

    mask = all_columns("loss_mask").astype(np.int32)
    advantages = all_columns("advantages")[mask != 0]
    return Sample(
        tokens=as_tokens(batch["sequences"][row][kept], where),
        loss_mask=mask,
        logprobs=full_sequence(all_columns("rollout_logprobs"), mask, np.float32)
        if "rollout_logprobs" in batch
        else None,
        reward=float(advantages.mean()) if len(advantages) else 0.0,
        group=group,
    )
