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
                tensors[plain_name(name)] = entry["dtype"], f"{crc32c(data[bytes_of].data):08x}"
    return Folder(path, folder_identity(path)["files"], tensors)


def shown_version(record: Record, step: int, needed: set[int], folder: Folder, use: str) -> int | None:
    """Return the weight version that the record shows a folder to have; None where nothing shows it.

    Args:
        needed: the versions that may be it, of which the record need not show any.
        use: what the newest of them is for the step, for the error: "it was sampled with".

    Raises RecordError if the folder has the weights of another version.
    """
    compared = list(versions_of(record, folder, 0 in needed)) if needed else []
    has = {version: name for version, name, is_same in compared if is_same}
    refuted = {version for version, _, is_same in compared if is_same is False}
    if needed & has.keys() or not (has or (needed and needed <= refuted)):
        return max(needed & has.keys(), default=None)
    newest = max(needed)
    right = f"leave out --model, or give {record.header.model['path']}"
    if newest > 0:
        before = step_of_version(record, newest)
        right = f"write it with `areal-debug goto {record.path} --step {before} -o FOLDER`, and give --model FOLDER"
    which = "are those of no recorded step"
    if has:
        version, name = next(iter(has.items()))
        which = f"are of version {version}, {name}, and {use} version {newest}"
    raise RecordError(f"{folder.path} is not the model of step {step}: its weights {which}; {right}")


def step_of_version(record: Record, version: int) -> int:
    """Return the step that starts from a weight version. Raises RecordError if it is not recorded."""
    for step in reversed(record.steps):
        if record.step(step).manifest.version - 1 == version:
            return step
    raise RecordError(
        f"{record.path} has no step that starts from version {version}, whose weights sampled: give the "
        "checkpoint of that version with --model"
    )


def start_version(record: Record, step: int) -> set[int]:
    """Return the version that a step starts from; empty where the trainer gave no versions."""
    return {record.step(step).manifest.version - 1} if sampled_versions(record, [step]) else set()


def sampled_versions(record: Record, steps: Sequence[int]) -> set[int]:
    """Return the versions that sampled the tokens of steps; empty where some are not known."""
    sampled: set[int] = set()
    for found in map(record.step, steps):
        for rank in range(found.manifest.num_ranks):
            if not found.known(rank, "versions").all():
                is_first = found.manifest.version == 1 and "imported" not in record.header.environment
                return {0} if is_first else set()
            sampled |= set(np.unique(found.batch(rank, ("versions",))["versions"]).tolist())
    return sampled - {-1}


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
            wanted = {plain_name(name): ("F32", crc) for name, crc in outcome.checksums.items()}
            is_same = has_tensors(folder, wanted)
            yield (
                outcome.version,
                f"those after step {outcome.step}",
                is_same or (is_same if is_ours else None),
            )


def plain_name(name: str) -> str:
    """Return the name of a weight without the parts in which files and modules of one model differ."""
    return name.replace("language_model.", "").removeprefix("model.")


def has_tensors(folder: Folder, wanted: Tensors) -> bool | None:
    """Return whether a folder has tensors; None unless it has most of them in their dtype."""
    alike = [name for name, (dtype, _) in wanted.items() if folder.tensors.get(name, ("",))[0] == dtype]
    if 2 * len(alike) <= len(wanted):
        return None
    return all(folder.tensors[name] == wanted[name] for name in alike)
