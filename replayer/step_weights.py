"""Whether a folder has the weights that a recorded step needs, by the checksums of the record.

A record has those of the first model's files, and of each parameter after each step. The first
model itself is compared where it is still there.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

from recorder import Record
from recorder.environment import folder_identity
from recorder.errors import RecordError

Tensors = dict[str, tuple[str, str]]  # name -> safetensors dtype and crc32c
WEIGHTS = (".safetensors", ".bin", ".gguf")


@dataclass(frozen=True)
class Folder:
    """A checkpoint in Hugging Face format; `tensors` are those of its safetensors files."""

    path: str
    files: dict[str, Any]
    tensors: Tensors


def read_folder(path: str) -> Folder:
    tensors: Tensors = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        data = np.memmap(file, np.uint8, "r")
        begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
        for name, entry in json.loads(data[8:begin].tobytes()).items():
            if name != "__metadata__":
                bytes_of = slice(*(begin + offset for offset in entry["data_offsets"]))
                tensors[name] = entry["dtype"], f"{crc32c(data[bytes_of].data):08x}"
    return Folder(path, folder_identity(path)["files"], tensors)


def are_shown(record: Record, steps: Sequence[int], folder: Folder) -> bool:
    """Return whether the record shows that a folder has the weights of steps.

    Raises RecordError if it shows that they are others.
    """
    needed = {version for step in steps for version in needed_versions(record, step)}
    compared = list(versions_of(record, folder, 0 in needed)) if needed else []
    has = {version: name for version, name, is_same in compared if is_same}
    refuted = {version for version, _, is_same in compared if is_same is False}
    if needed & has.keys() or not (has or (needed and needed <= refuted)):
        return bool(has)
    right = (
        f"write it with `areal-debug goto {record.path} --step {steps[0]} -o FOLDER`, and give --model FOLDER"
    )
    if 0 in needed:
        right = f"leave out --model, or give {record.header.model['path']}"
    which = "are those of no recorded step"
    if has:
        version, name = next(iter(has.items()))
        which = f"are of version {version}, {name}, and it was sampled with version {max(needed)}"
    raise RecordError(f"{folder.path} is not the model of step {steps[0]}: its weights {which}; {right}")


def needed_versions(record: Record, step: int) -> set[int]:
    """Return the newest version that sampled a step, and the one that it starts from, if known."""
    found = record.step(step)
    ranks = range(found.manifest.num_ranks)
    if not all(found.known(rank, "versions").all() for rank in ranks):
        return {0} if found.manifest.version == 1 and "imported" not in record.header.environment else set()
    sampled = max(int(found.batch(rank, ("versions",))["versions"].max(initial=-1)) for rank in ranks)
    return {found.manifest.version - 1, sampled} - {-1}


def versions_of(record: Record, folder: Folder, reads_first: bool) -> Iterator[tuple[int, str, bool | None]]:
    """Yield each version, its name, and whether the folder has it; None where that stays open."""
    # Another trainer may train in another dtype, and be recorded from the middle of a run on.
    first, is_ours = record.header.model, record.header.trainer is None
    is_same: bool | None = os.path.realpath(folder.path) == os.path.realpath(first["path"])
    if weights := {name: identity for name, identity in first["files"].items() if name.endswith(WEIGHTS)}:
        is_same = weights.items() <= folder.files.items()
    if not is_same:
        own = read_folder(first["path"]) if weights and reads_first else folder
        is_kept = own is not folder and weights.items() <= own.files.items()
        is_same = has_tensors(folder, own.tensors) if is_kept else None
    if record.step(record.steps[0]).manifest.version == 1:
        yield 0, "those that the run started from", is_same or (is_same if is_ours else None)
    for step in map(record.step, record.steps):
        if step.rank_name("outcome", 0, "json") in step.manifest.files:
            outcome = step.outcome(0)
            is_same = has_tensors(folder, {name: ("F32", crc) for name, crc in outcome.checksums.items()})
            yield (
                outcome.version,
                f"those after step {outcome.step}",
                is_same or (is_same if is_ours else None),
            )


def has_tensors(folder: Folder, wanted: Tensors) -> bool | None:
    """Return whether a folder has tensors; None unless it has most of them in their dtype."""
    alike = [name for name, (dtype, _) in wanted.items() if folder.tensors.get(name, ("",))[0] == dtype]
    if 2 * len(alike) <= len(wanted):
        return None
    return all(folder.tensors[name] == wanted[name] for name in alike)
