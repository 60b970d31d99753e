"""Upstream AReaL: `torch.save` of batches (`batch_data.pt` of its debugging guide).

A TensorDict, a padded dict of tensors, or a list with one padded dict per prompt, whose rows are
its samples. All tensors are [B, T] or [B] and aligned as here; `versions` may be absent.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recorder.errors import ForeignFormat
from recorder.importers.foreign import Foreign, Step, files_in_order, full_sequence, optional
from recorder.importers.stand_ins import Instance
from recorder.importers.unpickle import first_strings, load_pickle
from recorder.trainers.sample import STOP, Sample

KEYS = {"input_ids", "attention_mask", "loss_mask", "rewards"}
NOTES = ("weights and optimizer are not in the file: choose the model for a replay",)
FINISH_NOTE = "finish reasons are not in the file: every sample counts as stopped"
GROUPS_NOTE = (
    "groups are not in the file: rows with the same tokens before the first one in the loss mask are a group"
)


def recognises(path: Path) -> bool:
    """Return whether the path is a .pt file with a batch, or a folder of such files."""
    files = files_in_order(path, "*.pt")
    return bool(files) and files[0].suffix == ".pt" and first_strings(files[0]) >= KEYS


def tensors_of(document: Any) -> Any:
    """Return the tensors of a TensorDict as older versions pickle it; other values unchanged."""
    if (
        isinstance(document, Instance)
        and isinstance(document.state, dict)
        and "_tensordict" in document.state
    ):
        return document.state["_tensordict"]
    return document


def is_batch(document: Any) -> bool:
    """Return whether the document is a batch."""
    return isinstance(document, dict) and document.keys() >= KEYS


def read(path: Path) -> Foreign:
    """Read one step per file. Raises ForeignFormat, UnsafePickle."""
    steps, notes = [], [*NOTES]
    for file in files_in_order(path, "*.pt"):
        document = load_pickle(file)
        batches = document if isinstance(document, list) else [tensors_of(document)]
        samples = []
        for number, batch in enumerate(batches):
            if not is_batch(batch):
                raise ForeignFormat(f"{file} is not a batch of AReaL: it lacks one of {sorted(KEYS)}")
            samples += parse_batch(batch, number if isinstance(document, list) else None)
            notes += [] if "finish_reason" in batch else [FINISH_NOTE]
            notes += [] if "prompt_id" in batch or isinstance(document, list) else [GROUPS_NOTE]
        steps.append(Step(file.name, samples))
    return Foreign("areal", steps, list(dict.fromkeys(notes)))


def parse_batch(document: Mapping[str, Any], group: int | None) -> list[Sample]:
    """Parse the rows of a padded batch; without `group`, by `prompt_id` or by the prompt."""
    lengths = np.asarray(document["attention_mask"]).astype(bool).sum(axis=1)
    return [parse_row(document, row, int(length), group) for row, length in enumerate(lengths)]


def parse_row(document: Mapping[str, Any], row: int, length: int, group: int | None) -> Sample:
    """Parse one row, without its padding."""
    tokens = np.asarray(document["input_ids"])[row, :length].astype(np.int32)
    mask = np.asarray(document["loss_mask"])[row, :length].astype(np.int32)
    first = int(mask.argmax()) if mask.any() else length
    logprobs, versions, prompt_ids, reasons = (
        optional(document, name) for name in ("logprobs", "versions", "prompt_id", "finish_reason")
    )
    prompt = tokens[:first].tobytes() if prompt_ids is None else int(prompt_ids[row])
    return Sample(
        tokens=tokens,
        loss_mask=mask,
        logprobs=None if logprobs is None else full_sequence(logprobs[row, :length], mask, np.float32),
        reward=float(document["rewards"][row]),
        group=prompt if group is None else group,
        finish_reason=STOP if reasons is None else int(reasons[row]),
        versions=None if versions is None else np.where(mask, versions[row, :length], -1).astype(np.int32),
    )
