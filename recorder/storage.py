"""Storage of a record's bytes: a small interface that hides whether it is a folder or an archive.

    open_record, verify, replay  ->  Storage  ->  FolderStorage    the files themselves
                                              ->  ArchiveStorage   the same files, rebuilt from a zarr store

Paths are relative to the record's top, with slashes: `steps/000042/step.json`.
`reader.open_storage` chooses the implementation.
"""

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from areal_core.safety.file_names import MAX_DEPTH, UnsafeName, open_below
from recorder.errors import DamagedRecord

LARGEST_KEPT = 1 << 26
STAGING_SUFFIX = ".recording"  # of the folder in which a run stages the steps of an archive
# A URL that passed through pathlib has lost one of its slashes.
URL = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}(?=[^/])")


class Storage(Protocol):
    """A place that contains a record."""

    def names(self, folder: str) -> list[str]:
        """Names of files and folders in a folder ("" is the top), unordered; [] if absent.

        Raises DamagedRecord for a link.
        """
        ...

    def size(self, file: str) -> int | None:
        """Size of a file in bytes, None if there is no such file, or a folder.

        Raises DamagedRecord for a link and for anything but a regular file.
        """
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
        place = self.path
        for part in PurePosixPath(folder).parts:
            place /= part
            if place.is_symlink():
                raise DamagedRecord(folder, f"goes through the link {part}: links are not followed")
        try:
            return os.listdir(place)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise DamagedRecord(folder, f"cannot be listed ({error.strerror})") from None

    def size(self, file: str) -> int | None:
        """See Storage."""
        descriptor = self.open(file)
        if descriptor is None:
            return None
        with open(descriptor, "rb") as handle:
            return os.fstat(handle.fileno()).st_size

    def read(self, file: str, offset: int = 0, size_bytes: int | None = None) -> bytes | bytearray:
        """See Storage."""
        descriptor = self.open(file)
        if descriptor is None:
            return b""
        with open(descriptor, "rb") as handle:
            left = max(0, os.fstat(descriptor).st_size - offset)  # nothing is allocated beyond it
            wanted = left if size_bytes is None else min(left, size_bytes)
            try:
                handle.seek(offset)
                buffer = bytearray(wanted)
                found = handle.readinto(buffer)
            except OSError as error:
                raise DamagedRecord(file, f"cannot be read ({error.strerror})") from None
        return buffer if found == wanted else buffer[:found]

    def open(self, file: str) -> int | None:
        """Open a regular file without following links; None if it is absent or a folder.

        Raises DamagedRecord for a link, a device or a FIFO, and where the system refuses.
        """
        try:
            return open_below(self.path, file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UnsafeName as error:
            mode = self.kind(file)
            if stat.S_ISDIR(mode) and file.count("/") < MAX_DEPTH:
                return None
            what = str(error)
            if stat.S_ISLNK(mode):
                what = "is a link: links are not followed"
            elif mode and not stat.S_ISREG(mode):
                what = "is no regular file: nothing else is read or written"
            raise DamagedRecord(file, what) from None
        except OSError as error:
            raise DamagedRecord(file, f"cannot be opened ({error.strerror})") from None

    def kind(self, file: str) -> int:
        """Return the mode of what the name is, 0 if there is nothing; a link is not followed."""
        try:
            return os.lstat(self.path / file).st_mode
        except (OSError, ValueError):
            return 0

    def local_folder(self, folder: str) -> Path:
        """See Storage."""
        return self.path / folder


@dataclass
class KeptFiles:
    """A storage whose small files are read once, and stay in memory.

    Files beyond `LARGEST_KEPT` bytes in all are read from the storage each time.
    """

    storage: Storage
    files: dict[str, bytes | bytearray] = field(default_factory=dict)
    beyond: set[str] = field(default_factory=set)
    room_bytes: int = LARGEST_KEPT

    def names(self, folder: str) -> list[str]:
        """See Storage."""
        return self.storage.names(folder)

    def size(self, file: str) -> int | None:
        """See Storage."""
        return len(self.files[file]) if self.keep(file) else self.storage.size(file)

    def read(self, file: str, offset: int = 0, size_bytes: int | None = None) -> bytes | bytearray:
        """See Storage."""
        if not self.keep(file):
            return self.storage.read(file, offset, size_bytes)
        return self.files[file][offset : None if size_bytes is None else offset + size_bytes]

    def keep(self, file: str) -> bool:
        """Return whether a file is in memory; read it if there is room."""
        if file not in self.files and file not in self.beyond:
            data = self.storage.read(file, 0, self.room_bytes + 1)  # opens it once; `size` would again
            if len(data) > self.room_bytes:
                self.beyond.add(file)
            elif data or self.storage.size(file) is not None:
                self.files[file] = data
                self.room_bytes -= len(data)
        return file in self.files

    def local_folder(self, folder: str) -> Path:
        """See Storage."""
        return self.storage.local_folder(folder)


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
    """Return the path or URL as text; what exists here, such as a folder `s3:`, is no URL."""
    text = os.fspath(path)
    return text if "://" not in text and os.path.lexists(text) else URL.sub(r"\1://", text, count=1)


def is_url(location: str) -> bool:
    return "://" in location and URL.match(location) is not None


def is_archive_name(path: str | os.PathLike[str]) -> bool:
    """Return whether the location means an archive: a URL, or a name in `.zarr` or `.zip`."""
    location = location_of(path)
    return is_url(location) or location.endswith((".zarr", ".zip"))


def staging_folder(location: str, logs: Path) -> Path:
    """Return the staging folder: next to a local archive, else in the run's own folder."""
    return logs / "staging" if is_url(location) else Path(location + STAGING_SUFFIX)
