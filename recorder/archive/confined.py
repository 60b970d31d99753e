"""Read a record of somebody in a confined child process, and write its files safely."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from crc32c import crc32c

from areal_core.safety.file_names import open_below
from recorder.confine import bounds_for, run_confined
from recorder.errors import DamagedRecord, RecordError
from recorder.storage import Storage, file_blocks, location_of

ERRORS = (DamagedRecord, RecordError)  # of a child that reads a record
OnStep = Callable[[int], None]
Progress = Callable[[int, Callable[[OnStep], None]], None]


def no_progress(num_steps: int, work: Callable[[OnStep], None]) -> None:
    work(lambda step: None)


def is_in_memory(place: str | os.PathLike[str]) -> bool:
    """Return whether a URL means files in this process's memory, which a child cannot change."""
    return location_of(place).startswith("memory:")


def in_child(work: Callable[[], Any], inputs: Sequence[str | os.PathLike[str]], *writes: Path) -> Any:
    """Return `work()`, JSON, from a confined child that reads the inputs.

    Raises what it raises, and LimitReached.
    """
    if any(map(is_in_memory, inputs)):
        return work()
    return run_confined(work, bounds_for([location_of(place) for place in inputs], writes), errors=ERRORS)


def write_file(storage: Storage, name: str, folder: Path) -> str:
    """Write a file of a record below a folder, fsync it, return its crc32c as hex.

    A file that is there already is of a killed process, and replaced. Raises DamagedRecord if the
    record has no such regular file, UnsafeName.
    """
    if storage.size(name) is None:
        raise DamagedRecord(name, "is missing or no regular file")
    path = folder / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    crc = 0
    with open(open_below(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        for block in file_blocks(storage, name):
            file.write(block)
            crc = crc32c(block, crc)
        file.flush()
        os.fsync(file.fileno())
    return f"{crc:08x}"
