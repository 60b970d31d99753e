"""Storage of a record's bytes: a small interface that hides whether it is a folder or an archive.

    open_record, verify, replay  ->  Storage  ->  FolderStorage    the files themselves
                                              ->  ArchiveStorage   the same files, rebuilt from a zarr store

Paths are relative to the record's top, with slashes: `steps/000042/step.json`.
`reader.open_storage` chooses the implementation.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areal_core.safety.file_names import UnsafeName, open_below

STAGING_SUFFIX = ".recording"  # of the folder in which a run stages the steps of an archive
# A URL that passed through pathlib has lost one of its slashes.
URL = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}(?=[^/])")


class Storage(Protocol):
    """A place that contains a record."""

    def names(self, folder: str) -> list[str]:
        """Names of files and folders in a folder ("" is the top), unordered; [] if absent."""
        ...

    def size(self, file: str) -> int | None:
        """Size of a file in bytes, None if there is no such file."""
        ...

    def read(self, file: str, offset: int = 0, size_bytes: int | None = None) -> bytes | bytearray:
        """Read a file from `offset`, to its end or at most `size_bytes`; empty if absent."""
        ...

    def local_folder(self, folder: str) -> Path:
        """Return the folder as a path that other libraries can open on this machine."""
        ...


@dataclass(frozen=True)
class FolderStorage:
    """A record as it was written: a folder of files."""

    path: Path

    def names(self, folder: str) -> list[str]:
        """See Storage."""
        try:
            return os.listdir(self.path / folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, file: str) -> int | None:
        """See Storage."""
        try:
            descriptor = open_below(self.path, file)
        except (OSError, UnsafeName):
            return None
        with open(descriptor, "rb") as handle:
            return os.fstat(handle.fileno()).st_size

    def read(self, file: str, offset: int = 0, size_bytes: int | None = None) -> bytes | bytearray:
        """See Storage."""
        try:
            with open(open_below(self.path, file), "rb") as handle:
                handle.seek(offset)
                if size_bytes is None:
                    return handle.read()
                buffer = bytearray(size_bytes)
                found = handle.readinto(buffer)
        except FileNotFoundError:
            return b""
        return buffer if found == size_bytes else buffer[:found]

    def local_folder(self, folder: str) -> Path:
        """See Storage."""
        return self.path / folder


def walk(storage: Storage, folder: str) -> Iterator[str]:
    """Yield the paths of all files under a folder ("" is the top), relative to it, sorted."""
    for name in sorted(storage.names(folder)):
        path = f"{folder}/{name}" if folder else name
        if storage.size(path) is not None:
            yield name
        else:
            yield from (f"{name}/{below}" for below in walk(storage, path))


def file_blocks(storage: Storage, file: str, block_bytes: int = 1 << 26) -> Iterator[bytes | bytearray]:
    """Read a file in blocks, because it may be larger than memory."""
    size_bytes = storage.size(file) or 0
    for offset in range(0, size_bytes, block_bytes):
        yield storage.read(file, offset, min(block_bytes, size_bytes - offset))


def location_of(path: str | os.PathLike[str]) -> str:
    """Return the path or URL as text."""
    return URL.sub(r"\1://", os.fspath(path), count=1)


def is_url(location: str) -> bool:
    """Return whether the location is an fsspec URL rather than a path."""
    return URL.match(location) is not None


def is_archive_name(path: str | os.PathLike[str]) -> bool:
    """Return whether the location means an archive: a URL, or a name in `.zarr` or `.zip`."""
    location = location_of(path)
    return is_url(location) or location.endswith((".zarr", ".zip"))


def staging_folder(location: str, logs: Path) -> Path:
    """Return the staging folder: next to a local archive, else in the run's own folder."""
    return logs / "staging" if is_url(location) else Path(location + STAGING_SUFFIX)
