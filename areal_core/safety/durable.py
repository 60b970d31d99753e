"""Write files that are complete or absent: temporary file, fsync, rename, fsync of the folder."""

import os
from pathlib import Path
from typing import Any


def write_durably(path: Path, *parts: Any) -> None:
    """Write the buffers of bytes one after another, then fsync."""
    with path.open("wb", buffering=0) as file:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Fsync a file or a folder's entries; without it a rename may be lost on power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def commit_file(path: Path, data: bytes) -> None:
    """Write a file that has its name only when it is complete; a failure leaves nothing behind."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        write_durably(temporary, data)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)
