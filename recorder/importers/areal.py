"""Upstream AReaL: batches saved with `torch.save` (`batch_data.pt` of its debugging guide), in three shapes over time.

A TensorDict, a padded dict of tensors, or a list with one padded dict a prompt, rows being its samples. All tensors are [B, T] or [B] and
aligned as here; `versions` may be absent.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recorder.importers.sample import Foreign, ForeignFormat, Sample, Step, files_in_order, full_sequence
from recorder.importers.stand_ins import Instance
from recorder.importers.unpickle import first_strings, load_pickle

KEYS = {"input_ids", "attention_mask", "loss_mask", "rewards"}
NOTES = (
    "finish reasons are not in the file: every sample counts as stopped",
    "weights and optimizer are not in the file: say with which model to replay",
)
GROUPS_NOTE = "groups are not named in a padded batch: rows that share the tokens before their first trained one are a group"


def recognises(path: Path) -> bool:
    """A .pt file with a batch, or a folder of such files."""
    files = files_in_order(path, "*.pt")
    return bool(files) and files[0].suffix == ".pt" and first_strings(files[0]) >= KEYS


def tensors_of(document: Any) -> Any:
    """The tensors of a TensorDict as older versions pickle it; anything else as it is."""
    if (
        isinstance(document, Instance)
        and isinstance(document.state, dict)
        and "_tensordict" in document.state
    ):
        return document.state["_tensordict"]
    return document


def is_batch(document: Any) -> bool:
    """Whether this is a batch."""
    return isinstance(document, dict) and document.keys() >= KEYS


def read(path: Path) -> Foreign:
    """One step a file. Raises ForeignFormat, UnsafePickle."""
    steps, notes = [], set(NOTES)
    for file in files_in_order(path, "*.pt"):
        document = load_pickle(file)
        if isinstance(document, list):
            samples = [
                sample
                for number, batch in enumerate(document)
                for sample in parse_batch(batch, f"{file}, prompt {number}", number)
            ]
        else:
            samples = parse_batch(tensors_of(document), str(file), None)
            notes.add(GROUPS_NOTE)
        steps.append(Step(file.name, samples))
    return Foreign("areal", steps, sorted(notes))


def parse_batch(document: Any, where: str, group: int | None) -> list[Sample]:
    """The rows of a padded batch; without a number of their group, the prompt names it."""
    if not is_batch(document):
        raise ForeignFormat(f"{where} is no batch of AReaL: it lacks one of {sorted(KEYS)}")
    lengths = np.asarray(document["attention_mask"]).astype(bool).sum(axis=1)
    return [parse_row(document, row, int(length), group) for row, length in enumerate(lengths)]


def parse_row(document: Mapping[str, Any], row: int, length: int, group: int | None) -> Sample:
    """One row, cut to its length."""
    tokens = np.asarray(document["input_ids"])[row, :length].astype(np.int32)
    mask = np.asarray(document["loss_mask"])[row, :length].astype(np.int32)
    first = int(mask.argmax()) if mask.any() else length
    logprobs = document["logprobs"][row, :length] if "logprobs" in document else None
    versions = document["versions"][row, :length] if "versions" in document else None
    return Sample(
        tokens=tokens,
        loss_mask=mask,
        logprobs=None if logprobs is None else full_sequence(logprobs, mask, np.float32),
        reward=float(document["rewards"][row]),
        group=tokens[:first].tobytes() if group is None else group,
        versions=None if versions is None else np.where(mask, versions, -1).astype(np.int32),
    )
