"""Read a record from one zarr v3 store through the same interface as from a folder of files.

Every file of a record is a list of parts, each a slice of a long one-dimensional array of the
store:

    ARCHIVE/
      zarr.json                     attributes: `areal_debug_archive` 1, layout of the top files
      <stream>/documents            uint8: JSON, safetensors headers, text, layouts
      <stream>/input_ids.I32 ...    one array per key of the batch, in the stored dtype
      <stream>/checkpoints          uint8: files of anchors
      steps/000042/zarr.json        attributes: layout of that step; written last: the commit
      anchors/000040/zarr.json      the same for an anchor

Each writer appends to a stream of its own (`ArrayStream`). Arrays are sharded and compressed, and
zarr checks a crc32c of every chunk. The record's own checksums are a layer above and stay valid,
because a reader gets the bytes of the original files.
"""

import hashlib
import json
import os
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.core.sync import sync as run_in_zarr
from zarr.storage import FsspecStore, LocalStore, StorePath, ZipStore

from areal_core.safety.durable import write_durably
from recorder.errors import DamagedRecord, NotARecord, RecordError, RecordNotFound, UnknownFormat
from recorder.format import ANCHOR_FILE, ANCHORS_FOLDER, NUMPY_TYPES, STEPS_FOLDER
from recorder.storage import file_blocks, is_url, walk

ARCHIVE_VERSION = 1
VERSION_ATTRIBUTE, LAYOUT_ATTRIBUTE = "areal_debug_archive", "layout"


@dataclass(frozen=True)
class Part:
    """`count` elements of an array from element `offset`, stored as safetensors dtype `stored`."""

    array: str
    offset: int
    count: int
    stored: str

    @property
    def size_bytes(self) -> int:
        """Size of the part in the file, in bytes."""
        return self.count * NUMPY_TYPES[self.stored].itemsize


Layout = dict[str, list[Part]]  # file name -> its parts, in order


def layout_bytes(layout: Layout) -> bytes:
    """Serialize a layout as JSON."""
    parts = {name: [list(vars(part).values()) for part in parts] for name, parts in layout.items()}
    return json.dumps(parts, separators=(",", ":")).encode()


def parse_layout(data: bytes) -> Layout:
    """Parse a layout; the inverse of `layout_bytes`."""
    return {name: [parse_part(part) for part in parts] for name, parts in json.loads(data).items()}


def parse_part(document: Any) -> Part:
    """Parse a part as it is listed in JSON."""
    array, offset, count, stored = document
    return Part(array, offset, count, stored)


@dataclass
class ArchiveStorage:
    """The files of a record, rebuilt from a zarr store; see Storage. `location` is for messages."""

    location: str
    group: zarr.Group
    layouts: dict[str, Layout] = field(default_factory=dict)
    arrays: dict[str, zarr.Array[Any]] = field(default_factory=dict)

    def names(self, folder: str) -> list[str]:
        """See Storage."""
        if folder == "":
            folders = {STEPS_FOLDER, ANCHORS_FOLDER}.intersection(self.children(""))
            return [*self.layout_of("")[0], *sorted(folders)]
        if folder in (STEPS_FOLDER, ANCHORS_FOLDER):
            return self.children(folder)
        layout, below = self.layout_of(folder + "/")
        return sorted({name[len(below) :].split("/")[0] for name in layout if name.startswith(below)})

    def size(self, file: str) -> int | None:
        """See Storage."""
        layout, name = self.layout_of(file)
        return sum(part.size_bytes for part in layout[name]) if name in layout else None

    def read(self, file: str, offset: int = 0, size_bytes: int | None = None) -> bytes | bytearray:
        """See Storage. Raises DamagedRecord where zarr finds damage."""
        layout, name = self.layout_of(file)
        if name not in layout:
            return b""
        end = None if size_bytes is None else offset + size_bytes
        found, begin = bytearray(), 0
        for part in layout[name]:
            after = begin + part.size_bytes
            if offset < after and (end is None or begin < end):
                skipped = max(0, offset - begin)
                found += self.part(file, part)[skipped : None if end is None else end - begin]
            begin = after
        return found

    def local_folder(self, folder: str) -> Path:
        """Return a local copy of the folder in the temporary folder; made if it does not exist."""
        return local_copy(self, folder)

    def part(self, file: str, part: Part) -> memoryview:
        """Return the bytes of a part as in the file."""
        try:
            if part.array not in self.arrays:
                self.arrays[part.array] = self.group[part.array]  # type: ignore[assignment]
            values = self.arrays[part.array][part.offset : part.offset + part.count]
        except Exception as error:  # zarr lets whatever its codecs and parsers raise through
            what = f"cannot be read from {part.array} of the archive ({type(error).__name__}: {error})"
            raise DamagedRecord(file, what) from None
        return np.ascontiguousarray(values).view(np.uint8).data

    def layout_of(self, file: str) -> tuple[Layout, str]:
        """Return the layout of the step or anchor that contains the file, and its name there.

        The layout is empty if there is no such step or anchor.
        """
        folder, name = "", file
        if file.count("/") > 1:
            top, number, name = file.split("/", 2)
            folder = f"{top}/{number}"
        if folder not in self.layouts:
            found = self.read_layout(folder)
            if found is None:  # not cached: the run may still be recording
                return {}, name
            self.layouts[folder] = found
        return self.layouts[folder], name

    def read_layout(self, folder: str) -> Layout | None:
        """Return the layout that a group's attributes refer to, None if there is no such group."""
        try:
            group = self.group[folder] if folder else self.group
            where = parse_part(group.attrs[LAYOUT_ATTRIBUTE])
        except KeyError:
            return None
        except Exception as error:  # as above
            what = f"is not readable ({type(error).__name__}: {error})"
            raise DamagedRecord(f"{folder}/zarr.json", what) from None
        data = bytes(self.part(folder, where))
        try:
            return parse_layout(data)
        except (ValueError, TypeError, AttributeError) as error:
            raise DamagedRecord(f"{folder}/zarr.json", f"does not refer to a layout ({error})") from None

    def children(self, folder: str) -> list[str]:
        """List the names below a group, with one listing and without reading the entries."""
        listed = list_store(self.group.store_path / folder if folder else self.group.store_path)
        return [name for name in listed if name != "zarr.json"]


def list_store(place: StorePath) -> list[str]:
    """List the names of objects and prefixes directly below a path of a store."""

    async def collect() -> list[str]:
        return [name.strip("/") async for name in place.store.list_dir(place.path)]

    return run_in_zarr(collect())


def open_store(location: str, read_only: bool) -> LocalStore | ZipStore | FsspecStore:
    """Open the zarr store at a path or URL."""
    if is_url(location):
        with warnings.catch_warnings():
            # zarr wraps synchronous file systems, which affects speed only
            warnings.filterwarnings("ignore", category=UserWarning, module="zarr")
            return FsspecStore.from_url(location, read_only=read_only)
    if Path(location).is_file():
        return ZipStore(location, mode="r")
    return LocalStore(location, read_only=read_only)


def file_system(location: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the path in it.

    Raises RecordError if a package is missing or the URL is invalid.
    """
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(location)
    except (ImportError, ValueError) as error:
        raise RecordError(f"{location} cannot be reached: {error}") from None


def open_archive(location: str) -> ArchiveStorage:
    """Open the archive at a folder, zip file or URL.

    Raises RecordNotFound, NotARecord, UnknownFormat, DamagedRecord.
    """
    try:
        store = open_store(location, read_only=True)
    except ImportError as error:
        raise RecordNotFound(f"{location} needs another package: {error}") from None
    except ValueError as error:
        raise RecordNotFound(f"{location} cannot be opened: {error}") from None
    try:
        group = zarr.open_group(store, mode="r", use_consolidated=False)
    except FileNotFoundError:
        raise RecordNotFound(f"nothing exists at {location}: give the path or URL of a record") from None
    except Exception as error:  # zarr lets whatever its parser raises through
        raise DamagedRecord("zarr.json", f"is not readable ({type(error).__name__}: {error})") from None
    attributes = dict(group.attrs)
    if VERSION_ATTRIBUTE not in attributes:
        raise NotARecord(f"{location} is a zarr store, but not a finished archive of a record")
    if (version := attributes[VERSION_ATTRIBUTE]) != ARCHIVE_VERSION:
        raise UnknownFormat(
            f"{location} is an archive of version {version}, this version of areal-debug reads {ARCHIVE_VERSION}: "
            "install the version that wrote it"
        )
    return ArchiveStorage(location, group)


def local_copy(storage: ArchiveStorage, folder: str) -> Path:
    """Copy an anchor to the temporary folder, named by its checksums.

    All ranks of a machine share the copy, and so do later replays.
    """
    digest = hashlib.sha256(storage.read(f"{folder}/{ANCHOR_FILE}")).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"areal-debug-{os.getuid()}" / digest
    if not place.exists():
        place.parent.mkdir(mode=0o700, exist_ok=True)
        if place.parent.stat().st_uid != os.getuid():  # another user could replace the weights
            raise RecordError(f"{place.parent} belongs to another user: set TMPDIR to a folder of your own")
        unfinished = Path(tempfile.mkdtemp(dir=place.parent))
        for name in walk(storage, folder):
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            write_durably(unfinished / name, *file_blocks(storage, f"{folder}/{name}"))
        try:
            unfinished.rename(place)
        except OSError:  # another rank was faster: its copy has the same bytes
            assert place.exists()
    return place
