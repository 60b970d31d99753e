"""Objects of a zarr store, read from a folder, a zip file or an fsspec URL: untrusted bytes.

A folder is a `FolderStorage`, which follows no link and opens regular files only. A zip file must
be as `pack.zip_folder` writes it: stored without compression or encryption, each name once, no
bytes in two entries.
"""

import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from areal_core.safety.file_names import UnsafeName, checked_name
from recorder.errors import DamagedRecord, RecordError, RecordNotFound
from recorder.storage import FolderStorage, is_url

LOCAL_HEADER_BYTES = 30  # before the name of a zip entry
ENCRYPTED = 0x1  # flag bit of a zip entry


class Objects(Protocol):
    """Named bytes; a subset of `Storage`."""

    def names(self, folder: str) -> list[str]:
        """Names directly below a prefix ("" is the top), unordered; [] if there are none."""
        ...

    def size(self, file: str) -> int | None:
        """Size in bytes, None if there is no such object."""
        ...

    def read(self, file: str, offset: int = 0, size_bytes: int | None = None) -> bytes | bytearray:
        """Read from `offset`, to the end or at most `size_bytes`; empty if absent."""
        ...


@dataclass
class ZipObjects:
    """The entries of a zip file."""

    archive: zipfile.ZipFile
    entries: dict[str, zipfile.ZipInfo]
    children: dict[str, dict[str, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.entries:
            while name:
                name, _, child = name.rpartition("/")
                self.children.setdefault(name, {})[child] = None

    def names(self, folder: str) -> list[str]:
        """See Objects."""
        return list(self.children.get(folder, ()))

    def size(self, file: str) -> int | None:
        """See Objects."""
        return self.entries[file].file_size if file in self.entries else None

    def read(self, file: str, offset: int = 0, size_bytes: int | None = None) -> bytes:
        """See Objects."""
        if file not in self.entries:
            return b""
        with self.archive.open(self.entries[file]) as handle:
            handle.seek(offset)
            return handle.read() if size_bytes is None else handle.read(size_bytes)


@dataclass(frozen=True)
class UrlObjects:
    """The objects below a path of an fsspec file system."""

    files: Any
    path: str

    def names(self, folder: str) -> list[str]:
        """See Objects."""
        try:
            listed = self.files.ls(self.below(folder), detail=False)
        except FileNotFoundError:
            return []
        return [str(name).rstrip("/").rpartition("/")[2] for name in listed]

    def size(self, file: str) -> int | None:
        """See Objects."""
        try:
            facts = self.files.info(self.below(file))
        except FileNotFoundError:
            return None
        return facts["size"] if facts["type"] == "file" else None

    def read(self, file: str, offset: int = 0, size_bytes: int | None = None) -> bytes:
        """See Objects."""
        end = None if size_bytes is None else offset + size_bytes
        try:
            return bytes(self.files.cat_file(self.below(file), start=offset, end=end))
        except FileNotFoundError:
            return b""

    def below(self, name: str) -> str:
        """Return the path of an object."""
        return f"{self.path.rstrip('/')}/{name}" if name else self.path


def open_objects(location: str) -> Objects:
    """Open the store at a folder, zip file or URL.

    Raises RecordNotFound if nothing can be opened there, DamagedRecord for a zip file that
    `record archive` cannot have written.
    """
    if is_url(location):
        try:
            return UrlObjects(*file_system(location))
        except RecordError as error:
            raise RecordNotFound(str(error)) from None
    path = Path(location)
    if path.is_dir():
        return FolderStorage(path)
    if not path.is_file():
        raise RecordNotFound(f"{location} is no regular file: give the path or URL of a record")
    return open_zip(path)


def file_system(location: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the path in it.

    Raises RecordError if a package is missing or the URL is invalid.
    """
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(location)
    except (ImportError, ValueError) as error:
        raise RecordError(f"{location} cannot be reached: {error}") from None


def open_zip(path: Path) -> ZipObjects:
    """Open a zip file after checking all of its entries. Raises DamagedRecord."""
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise DamagedRecord(path.name, f"is no readable zip file ({error})") from None
    entries: dict[str, zipfile.ZipInfo] = {}
    end = 0
    try:
        for entry in sorted(archive.infolist(), key=lambda entry: entry.header_offset):
            check_entry(entry, end, entries)
            end = entry.header_offset + LOCAL_HEADER_BYTES + len(entry.filename.encode()) + entry.file_size
            entries[entry.filename] = entry
        if end > archive.start_dir:
            raise ValueError("its last entry reaches beyond the file")
    except ValueError as error:
        archive.close()
        what = f"is no zip file of `areal-debug record archive`: {error}"
        raise DamagedRecord(path.name, what) from None
    return ZipObjects(archive, entries)


def check_entry(entry: zipfile.ZipInfo, free_from: int, known: dict[str, zipfile.ZipInfo]) -> None:
    """Raise ValueError for an entry that is unsafe, compressed, encrypted, repeated or overlaps."""
    name = checked_name(entry.filename, "the zip file")
    if entry.filename in known:
        raise ValueError(f"it has {name} twice")
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise ValueError(f"{name} is compressed or lies about its size, entries must be stored")
    if entry.flag_bits & ENCRYPTED:
        raise ValueError(f"{name} is encrypted")
    if entry.header_offset < free_from:
        raise ValueError(f"{name} overlaps another entry")


def read_object(objects: Objects, name: str, max_bytes: int) -> bytes | None:
    """Read a small object completely, None if there is none.

    Raises DamagedRecord if it is larger than `max_bytes`, no regular file, or cannot be read.
    """
    try:
        size_bytes = objects.size(name)
        if size_bytes is None:
            if name in objects.names(os.path.dirname(name)):
                raise UnsafeName("is no regular file")
            return None
        if size_bytes > max_bytes:
            raise ValueError(f"has {size_bytes} bytes, at most {max_bytes} are read")
        return bytes(objects.read(name, 0, size_bytes))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DamagedRecord(name, str(error)) from None
