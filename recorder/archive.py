"""A record inside one zarr v3 store, read through the same questions as a folder of files.

Every file of a record is a list of parts, each a slice of a long one-dimensional array of the store:

    ARCHIVE/
      zarr.json                     attributes: `areal_debug_archive` 1, and where the layout of the files at the top is
      <lane>/documents              uint8: JSON, safetensors headers, text, layouts
      <lane>/input_ids.I32 ...      one array a key of the batch, in the dtype that the trainer saw
      <lane>/checkpoints            uint8: files of anchors
      steps/000042/zarr.json        attributes: where the layout of that step is; written last, so its presence is the commit
      anchors/000040/zarr.json      the same of an anchor

A lane belongs to whoever appends to it: `record archive` has one for everything, a run that records into zarr has one a rank.
Arrays are sharded and compressed, and zarr checks a crc32c of every chunk; the record's own checksums are above that and stay valid,
because what a reader gets are the bytes of the files.
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

from recorder.errors import DamagedRecord, NotARecord, RecordError, RecordNotFound, UnknownFormat
from recorder.format import ANCHOR_FILE, ANCHORS_FOLDER, STEPS_FOLDER
from recorder.sealed import write_durably
from recorder.storage import file_blocks, is_url, walk
from recorder.tensors import NUMPY_TYPES

ARCHIVE_VERSION = 1
VERSION_ATTRIBUTE, LAYOUT_ATTRIBUTE = "areal_debug_archive", "layout"


@dataclass(frozen=True)
class Part:
    """`count` elements of an array from element `offset`, which the file holds as `stored`, a safetensors dtype."""

    array: str
    offset: int
    count: int
    stored: str

    @property
    def size_bytes(self) -> int:
        """Bytes that the part has in the file."""
        return self.count * NUMPY_TYPES[self.stored].itemsize


Layout = dict[str, list[Part]]  # the files of a folder and what they are made of


def layout_bytes(layout: Layout) -> bytes:
    """The layout as JSON."""
    parts = {name: [list(vars(part).values()) for part in parts] for name, parts in layout.items()}
    return json.dumps(parts, separators=(",", ":")).encode()


def parse_layout(data: bytes) -> Layout:
    """The inverse of `layout_bytes`."""
    return {name: [parse_part(part) for part in parts] for name, parts in json.loads(data).items()}


def parse_part(document: Any) -> Part:
    """A part as JSON lists it."""
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
        """The folder, copied to this machine's temporary folder unless it is there already."""
        return local_copy(self, folder)

    def part(self, file: str, part: Part) -> memoryview:
        """The part's bytes as the file has them."""
        try:
            if part.array not in self.arrays:
                self.arrays[part.array] = self.group[part.array]  # type: ignore[assignment]
            values = self.arrays[part.array][part.offset : part.offset + part.count]
        except Exception as error:  # zarr lets whatever its codecs and parsers raise through
            what = f"cannot be read from {part.array} of the archive ({type(error).__name__}: {error})"
            raise DamagedRecord(file, what) from None
        return np.ascontiguousarray(values).view(np.uint8).data

    def layout_of(self, file: str) -> tuple[Layout, str]:
        """The layout of the step or anchor that holds the file, and the file's name in it; an empty one where there is neither."""
        folder, name = "", file
        if file.count("/") > 1:
            top, number, name = file.split("/", 2)
            folder = f"{top}/{number}"
        if folder not in self.layouts:
            found = self.read_layout(folder)
            if found is None:  # looked for again next time: the run may still be recording
                return {}, name
            self.layouts[folder] = found
        return self.layouts[folder], name

    def read_layout(self, folder: str) -> Layout | None:
        """The layout that a group's attributes point to, None where there is no such group."""
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
            raise DamagedRecord(f"{folder}/zarr.json", f"points to no layout ({error})") from None

    def children(self, folder: str) -> list[str]:
        """Names below a group, without reading what they are: one listing whatever their number."""
        listed = list_store(self.group.store_path / folder if folder else self.group.store_path)
        return [name for name in listed if name != "zarr.json"]


def list_store(place: StorePath) -> list[str]:
    """Names of objects and prefixes right below a place of a store."""

    async def collect() -> list[str]:
        return [name.strip("/") async for name in place.store.list_dir(place.path)]

    return run_in_zarr(collect())


def open_store(location: str, read_only: bool) -> LocalStore | ZipStore | FsspecStore:
    """The zarr store at a path or URL."""
    if is_url(location):
        with warnings.catch_warnings():
            # a file system that is not asynchronous is wrapped, which changes nothing but speed
            warnings.filterwarnings("ignore", category=UserWarning, module="zarr")
            return FsspecStore.from_url(location, read_only=read_only)
    if Path(location).is_file():
        return ZipStore(location, mode="r")
    return LocalStore(location, read_only=read_only)


def file_system(location: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it. Raises RecordError where a package is missing or the URL is none."""
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(location)
    except (ImportError, ValueError) as error:
        raise RecordError(f"{location} cannot be reached: {error}") from None


def open_archive(location: str) -> ArchiveStorage:
    """The archive at a folder, zip file or URL. Raises RecordNotFound, NotARecord, UnknownFormat, DamagedRecord."""
    try:
        store = open_store(location, read_only=True)
    except ImportError as error:
        raise RecordNotFound(f"{location} needs another package: {error}") from None
    except ValueError as error:
        raise RecordNotFound(f"{location} cannot be opened: {error}") from None
    try:
        group = zarr.open_group(store, mode="r", use_consolidated=False)
    except FileNotFoundError:
        raise RecordNotFound(f"there is nothing at {location}: give the place of a record") from None
    except Exception as error:  # zarr lets whatever its parser raises through
        raise DamagedRecord("zarr.json", f"is not readable ({type(error).__name__}: {error})") from None
    attributes = dict(group.attrs)
    if VERSION_ATTRIBUTE not in attributes:
        raise NotARecord(
            f"{location} is a zarr store, but no archive of a record, or one that was not finished"
        )
    if (version := attributes[VERSION_ATTRIBUTE]) != ARCHIVE_VERSION:
        raise UnknownFormat(
            f"{location} is an archive of version {version}, this version of areal-debug reads {ARCHIVE_VERSION}: "
            "install the version that wrote it"
        )
    return ArchiveStorage(location, group)


def local_copy(storage: ArchiveStorage, folder: str) -> Path:
    """A copy of an anchor, named by its checksums: every rank of a machine shares it, and so do later replays."""
    digest = hashlib.sha256(storage.read(f"{folder}/{ANCHOR_FILE}")).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"areal-debug-{os.getuid()}" / digest
    if not place.exists():
        place.parent.mkdir(mode=0o700, exist_ok=True)
        if place.parent.stat().st_uid != os.getuid():  # somebody could put other weights there
            raise RecordError(f"{place.parent} belongs to somebody else: set TMPDIR to a folder of your own")
        unfinished = Path(tempfile.mkdtemp(dir=place.parent))
        for name in walk(storage, folder):
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            write_durably(unfinished / name, *file_blocks(storage, f"{folder}/{name}"))
        try:
            unfinished.rename(place)
        except OSError:  # another rank was faster: its copy has the same bytes
            assert place.exists()
    return place
