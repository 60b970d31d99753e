"""Where a record's bytes lie. Readers ask four questions of a place and never know what keeps the files.

    open_record, verify, replay  ->  Storage  ->  FolderStorage    the files themselves
                                              ->  ArchiveStorage   the same files, rebuilt from a zarr store (archive.py)

Files are named from the record's top with slashes: `steps/000042/step.json`.
"""

import os
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from recorder.errors import RecordNotFound

ZARR_FILE = "zarr.json"
STAGING_SUFFIX = ".recording"  # of the folder in which a run stages the steps of an archive
# A URL that passed through pathlib has lost one of its slashes.
URL = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}(?=[^/])")


class Storage(Protocol):
    """A place that holds a record."""

    def names(self, folder: str) -> list[str]:
        """Names of the files and folders in a folder ("" is the top), in no order; none where it is absent."""
        ...

    def size(self, file: str) -> int | None:
        """Size of a file in bytes, None where there is no such file."""
        ...

    def read(self, file: str, offset: int = 0, size_bytes: int | None = None) -> bytes | bytearray:
        """Bytes of a file from `offset`, to its end or `size_bytes` of them; fewer where it ends before, none where it is absent."""
        ...

    def local_folder(self, folder: str) -> Path:
        """The folder as one that other libraries can open on this machine."""
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
        path = self.path / file
        return path.stat().st_size if path.is_file() else None

    def read(self, file: str, offset: int = 0, size_bytes: int | None = None) -> bytes | bytearray:
        """See Storage."""
        try:
            with (self.path / file).open("rb") as handle:
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
    """Names of all files under a folder ("" is the top), from that folder, in order."""
    for name in sorted(storage.names(folder)):
        path = f"{folder}/{name}" if folder else name
        if storage.size(path) is not None:
            yield name
        else:
            yield from (f"{name}/{below}" for below in walk(storage, path))


def file_blocks(storage: Storage, file: str, block_bytes: int = 1 << 26) -> Iterator[bytes | bytearray]:
    """A file in blocks, for it may be larger than memory."""
    size_bytes = storage.size(file) or 0
    for offset in range(0, size_bytes, block_bytes):
        yield storage.read(file, offset, min(block_bytes, size_bytes - offset))


def location_of(path: str | os.PathLike[str]) -> str:
    """The path or URL as text."""
    return URL.sub(r"\1://", os.fspath(path), count=1)


def is_url(location: str) -> bool:
    """Whether the location is an fsspec URL and no path."""
    return URL.match(location) is not None


def is_archive_name(path: str | os.PathLike[str]) -> bool:
    """Whether a run that is told to record there means an archive: a URL, or a folder that ends in `.zarr`."""
    location = location_of(path)
    return is_url(location) or location.endswith((".zarr", ".zip"))


def staging_folder(location: str, logs: Path) -> Path:
    """Where steps are staged: beside an archive of this machine, else in the run's own folder."""
    return logs / "staging" if is_url(location) else Path(location + STAGING_SUFFIX)


def open_storage(path: str | os.PathLike[str]) -> Storage:
    """The storage at a folder, a zip file or an fsspec URL.

    Raises RecordNotFound where there is nothing, and NotARecord for a file or store that is no archive.
    """
    location = location_of(path)
    local = Path(location)
    if not is_url(location):
        if not local.exists():
            raise RecordNotFound(f"{location} does not exist: give the folder that a run recorded into")
        if local.is_dir() and not (local / ZARR_FILE).is_file():
            return FolderStorage(local)
        if local.is_file() and not zipfile.is_zipfile(local):
            raise RecordNotFound(f"{location} is a file: give the folder that a run recorded into")
    from recorder.archive import open_archive  # zarr takes 0.2 s to import

    return open_archive(location)
