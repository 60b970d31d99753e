"""SkyRL: `global_step_{N}_training_input.pkl`, a pickled TrainingInputBatch.

`loss_mask`, `rollout_logprobs` and others cover the last columns of `sequences`, the response. The
attention mask marks padding: before version 0.4 between prompt and response as well. The last
`pad_size` rows are copies with weight 0. The dump has advantages but no rewards.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from recorder.errors import ForeignFormat
from recorder.importers.foreign import (
    BY_PROMPT,
    NO_VERSIONS_OR_REASONS,
    NO_WEIGHTS,
    Foreign,
    experts_of,
    member,
    optional,
    sequence_sample,
)
from recorder.importers.sources import Source, read_files
from recorder.importers.stand_ins import Instance
from recorder.importers.unpickle import load_bytes, load_pickle
from recorder.pictures.imported import pictures_in
from recorder.trainers.batches import unknown_value
from recorder.trainers.sample import LEARNING, Sample

FILES = r".*_training_input\.pkl"
NOTES = (NO_VERSIONS_OR_REASONS, NO_WEIGHTS)
REBUILD = "_rebuild_tensor_batch"
COLUMNS = {
    "advantages": "advantages",
    "returns": "returns",
    "action_log_probs": LEARNING["old_logprobs"],
    "base_action_log_probs": LEARNING["ref_logprobs"],
    "values": "values",
}


def find(source: Source) -> list[Path]:
    """Return the files of the steps."""
    return source.named(FILES)


def read(source: Source, files: Sequence[Path]) -> Foreign:
    """Read one step per file. Raises ForeignFormat, UnsafePickle."""
    return read_files("skyrl", NOTES, files, read_batch)


def read_batch(file: Path, notes: list[str]) -> list[Sample]:
    """Read the rows of a file; add to the notes what they lack."""
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
            parse_row(batch, row, None if groups is None else groups[row], f"{file}, row {row}"),
            **pictures_in(tensors_of_row(lists, row, f"{file}, row {row}"), None, notes),
        )
        for row in range(num_rows)
    ]


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


def parse_row(batch: Mapping[str, np.ndarray], row: int, group: Hashable, where: str) -> Sample:
    """Parse one row, without its padding."""
    kept = batch["attention_mask"][row].astype(bool)

    def column(key: str) -> Any:
        """Extend values of the last columns to all columns, with 0 in front."""
        if key not in batch:
            return None
        values = batch[key][row]
        return np.concatenate([np.zeros(len(kept) - len(values), values.dtype), values])[kept]

    tokens, response, experts = batch["sequences"][row][kept], column("response_mask"), None
    prompt_length = None if response is None or not response.any() else int((response != 0).argmax())
    if "rollout_expert_indices" in batch:
        experts = batch["rollout_expert_indices"][row][kept]
        if "router_padding_mask" in batch:  # true where the engine reported none
            absent = batch["router_padding_mask"][row][kept].astype(bool)
            experts[absent] = unknown_value(experts.dtype)
    return sequence_sample(
        tokens,
        column("loss_mask"),
        logprobs=column("rollout_logprobs"),
        learning={name: column(key) for key, name in COLUMNS.items()},
        group=tokens[:prompt_length].tobytes() if group is None and prompt_length is not None else group,
        extras={} if experts is None else experts_of(experts, len(tokens), where),
        prompt_length=prompt_length,
        where=where,
    )
