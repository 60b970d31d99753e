"""Read a record from one zarr v3 store through the same interface as from a folder of files.

Every file of a record is a list of parts, each a slice of a long one-dimensional array of the
store:

    ARCHIVE/
      zarr.json                     attributes: `areal_debug_archive` 1, layout of the top files
      <stream>/documents            uint8: JSON, safetensors headers, text, layouts
      <stream>/input_ids.I32 ...    one array per key of the batch, in the stored dtype
      <stream>/checkpoints          uint8: files of anchors
      <stream>/pictures             uint8: pictures, whose parts steps share
      steps/000042/zarr.json        attributes: layout of that step; written last: the commit
      anchors/000040/zarr.json      the same for an anchor

The layout of a step also has its pictures, `images/SHA256`; steps with the same one share a part.
Each writer appends to a stream of its own (`ArrayStream`). Arrays are sharded and compressed, with
a crc32c of every chunk. The record's own checksums are a layer above and stay valid, because a
reader gets the bytes of the original files. An archive may come from anybody: names, sizes and
places are checked as they are parsed, before anything that they refer to is read.

Arrays are read here, exactly the kind that `archive.array_streams` writes: zarr itself would read
any codec that its packages know, some of which unpickle. A zip file must be as `record archive`
writes it: stored without compression or encryption, each name once, no bytes in two entries.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import stat
import struct
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from crc32c import crc32c
from numcodecs import blosc, zstd

from areal_core.safety.file_names import UnsafeName, checked_name
from areal_core.safety.scratch import FolderInUse, unfinished_folder
from recorder.confine import in_child, write_file
from recorder.documents import parse_checksummed
from recorder.errors import DamagedRecord, NotARecord, RecordError, RecordNotFound, UnknownFormat
from recorder.format import (
    ANCHOR_FILE,
    ANCHORS_FOLDER,
    IMAGES_FOLDER,
    NUMPY_TYPES,
    STEPS_FOLDER,
    parse_anchor,
    step_number,
)
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
        listed = self._ask("ls", folder, detail=False) or ()
        return [str(name).rstrip("/").rpartition("/")[2] for name in listed]

    def size(self, file: str) -> int | None:
        """See Objects."""
        facts = self._ask("info", file)
        return facts["size"] if facts and facts["type"] == "file" else None

    def read(self, file: str, offset: int = 0, size_bytes: int | None = None) -> bytes:
        """See Objects."""
        end = None if size_bytes is None else offset + size_bytes
        return bytes(self._ask("cat_file", file, start=offset, end=end) or b"")

    def _ask(self, call: str, name: str, **options: object) -> Any:
        """Return what the file system answers, None if it has no such object. Raises OSError."""
        try:
            return getattr(self.files, call)(self.below(name), **options)
        except FileNotFoundError:
            return None
        except OSError:
            raise
        except Exception as error:  # of s3fs, gcsfs and others: their classes are not known here
            reason = f"{type(error).__name__}: {error}"
            raise OSError(errno.EIO, reason, self.below(name)) from error

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


CHUNK_BYTES = 1 << 18  # decompressed to read one token
SHARD_CHUNKS = 64  # 16 MiB of tensors an object
METADATA_BYTES = 1 << 20  # most of a zarr.json
CRC_BYTES = 4
ABSENT = 2**64 - 1  # in a shard's index: the chunk is all zeros and not stored
DTYPES = {dtype.name: dtype for dtype in NUMPY_TYPES.values()}
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}
KEYS = {"name": "default", "configuration": {"separator": "/"}}


@dataclass
class ArchivedArray:
    """One array. `chunk` and `shard` are numbers of elements."""

    objects: Objects
    name: str
    dtype: np.dtype[Any]
    length: int
    chunk: int
    shard: int
    compressor: str
    indexes: dict[int, np.ndarray] = field(default_factory=dict)
    last: tuple[int, bytearray] | None = None  # documents of consecutive steps share a chunk

    def read(self, offset: int, count: int) -> bytearray:
        """Return the bytes of `count` elements from element `offset`. Raises DamagedRecord."""
        found = bytearray()
        try:
            if not 0 <= offset <= offset + count <= self.length:
                raise ValueError(f"elements {offset} to {offset + count} of {self.length} are wanted")
            for number in range(offset // self.shard, -(-(offset + count) // self.shard)):
                begin = number * self.shard
                low, high = max(offset - begin, 0), min(offset + count - begin, self.shard)
                found += b"".join(self.shard_bytes(number, low, high)) if low < high else b""
        except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
            what = f"{self.name} of the archive cannot be read: {error}"
            raise DamagedRecord(f"{self.name}/zarr.json", what) from None
        return found

    def shard_bytes(self, number: int, low: int, high: int) -> Iterator[memoryview]:
        size = self.dtype.itemsize
        index = self.index(number)
        for chunk in range(low // self.chunk, -(-high // self.chunk)):
            begin = chunk * self.chunk
            data = self.chunk_bytes(number, chunk, index)
            yield memoryview(data)[max(low - begin, 0) * size : min(high - begin, self.chunk) * size]

    def index(self, number: int) -> np.ndarray | None:
        """Return [chunks, 2] offsets and sizes of a shard, None if the shard is not stored."""
        if number in self.indexes:
            return self.indexes[number]
        name = f"{self.name}/c/{number}"
        size_bytes = self.objects.size(name)
        if size_bytes is None:
            return None
        num_chunks = self.shard // self.chunk
        index_bytes = 16 * num_chunks + CRC_BYTES
        most = 2 * self.shard * self.dtype.itemsize + index_bytes
        if not index_bytes <= size_bytes <= most:
            raise ValueError(f"shard {number} has {size_bytes} bytes, {index_bytes} to {most} expected")
        data = checked(
            self.objects.read(name, size_bytes - index_bytes, index_bytes), f"index of shard {number}"
        )
        index = np.frombuffer(data, "<u8").reshape(num_chunks, 2)
        begins, sizes = index[index[:, 0] != ABSENT].T
        room = size_bytes - index_bytes
        if (sizes > room).any() or (begins > room - sizes).any():
            raise ValueError(f"the index of shard {number} points outside of it")
        self.indexes[number] = index
        return index

    def chunk_bytes(self, number: int, chunk: int, index: np.ndarray | None) -> bytearray:
        position = number * (self.shard // self.chunk) + chunk
        if self.last is not None and self.last[0] == position:
            return self.last[1]
        chunk_size = self.chunk * self.dtype.itemsize
        data = bytearray(chunk_size)
        if index is not None and index[chunk, 0] != ABSENT:
            begin, size_bytes = map(int, index[chunk])
            stored = self.objects.read(f"{self.name}/c/{number}", begin, size_bytes)
            decompress(self.compressor, checked(stored, f"chunk {chunk} of shard {number}"), data)
        self.last = (position, data)
        return data


def checked(data: bytes | bytearray, what: str) -> memoryview:
    """Return the data without the crc32c at its end. Raises ValueError unless it matches."""
    view = memoryview(data)
    content, stored = view[:-CRC_BYTES], view[-CRC_BYTES:]
    if len(stored) != CRC_BYTES or struct.unpack("<I", stored)[0] != crc32c(content):
        raise ValueError(f"the {what} does not match its crc32c")
    return content


def decompress(compressor: str, data: memoryview, into: bytearray) -> None:
    """Fill `into`. Raises ValueError or RuntimeError; both codecs refuse a larger content."""
    if compressor == "blosc":
        # header of blosc 1: sizes of the content, of a block and of the data
        num_bytes, _, size_bytes = struct.unpack_from("<III", data, 4) if len(data) >= 16 else (0, 0, 0)
        if (num_bytes, size_bytes) != (len(into), len(data)):
            raise ValueError(f"a chunk of {num_bytes} bytes, {len(into)} expected")
        blosc.decompress(data, into)
        return
    zstd.decompress(data, into)


def open_array(objects: Objects, name: str) -> ArchivedArray:
    """Open an array after checking its metadata. Raises DamagedRecord."""
    document = read_metadata(objects, name)
    try:
        if document is None or document["node_type"] != "array":
            raise ValueError("the archive has no such array")
        return parse_array(document, objects, name)
    except (ValueError, KeyError, TypeError) as error:
        what = f"is not an array that `record archive` writes: {reason(error)}"
        raise DamagedRecord(f"{name}/zarr.json", what) from None


def read_metadata(objects: Objects, name: str) -> dict[str, Any] | None:
    """Read the zarr.json of a group or array, which must be zarr v3; None if there is none."""
    file = f"{name}/zarr.json" if name else "zarr.json"
    data = read_object(objects, file, METADATA_BYTES)
    if data is None:
        return None
    try:
        document = json.loads(data)
        if document["zarr_format"] != 3 or document["node_type"] not in ("group", "array"):
            raise ValueError(f"zarr format {document['zarr_format']!r}, only 3 is read")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedRecord(file, f"cannot be read: {reason(error)}") from None
    return document


def reason(error: Exception) -> str:
    """Return why a document is not as it was written, without the names of Python's errors."""
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError):
        return "it is no JSON, so it was cut off or changed"
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)


def parse_array(document: dict[str, Any], objects: Objects, name: str) -> ArchivedArray:
    """Parse the metadata of an array. Raises ValueError, KeyError, TypeError."""
    dtype = DTYPES[document["data_type"]]
    (length,) = document["shape"]
    grid, (sharding,) = document["chunk_grid"], document["codecs"]
    (shard,), (chunk,) = grid["configuration"]["chunk_shape"], sharding["configuration"]["chunk_shape"]
    sizes = (length, shard, chunk)
    if not all(type(size) is int and 0 <= size < 2**53 for size in sizes) or not chunk or shard % chunk:
        raise ValueError(f"length, shard and chunk {sizes}")
    if chunk * dtype.itemsize > CHUNK_BYTES or not 0 < shard // chunk <= SHARD_CHUNKS:
        raise ValueError(f"chunks of {chunk} and shards of {shard} elements are larger than written ones")
    encode, compressor, *crc = sharding["configuration"]["codecs"]
    if (
        grid["name"] != "regular"
        or sharding["name"] != "sharding_indexed"
        or sharding["configuration"]["index_codecs"] != [LITTLE, CRC]
        or sharding["configuration"].get("index_location", "end") != "end"
        or encode not in (LITTLE, {"name": "bytes"})
        or compressor["name"] not in ("zstd", "blosc")
        or crc != [CRC]
    ):
        raise ValueError(f"codecs {json.dumps(document['codecs'])[:500]}")
    if (
        document["fill_value"]
        or document["chunk_key_encoding"] != KEYS
        or document.get("storage_transformers")
    ):
        raise ValueError("another fill value, naming of chunks or transformation than written ones have")
    return ArchivedArray(objects, name, dtype, length, chunk, shard, compressor["name"])


ARCHIVE_VERSION = 1
VERSION_ATTRIBUTE, LAYOUT_ATTRIBUTE = "areal_debug_archive", "layout"
# zarr writes an object under such a name and renames it; a killed process leaves it
UNFINISHED_OBJECT = re.compile(r".+\.[0-9a-f]{32}\.partial")
MAX_LAYOUT_BYTES = 1 << 26


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
    parts = {name: [list(vars(part).values()) for part in parts] for name, parts in layout.items()}
    return json.dumps(parts, separators=(",", ":")).encode()


def parse_layout(data: bytes, where: str) -> Layout:
    """Parse a layout; the inverse of `layout_bytes`.

    Raises ValueError, KeyError, TypeError, RecursionError for a name that is not safe, a part that
    cannot be one, and for elements that are in two parts: what is written is appended once.
    """
    layout = {
        checked_name(name, where): [parse_part(part) for part in parts]
        for name, parts in json.loads(data).items()
    }
    slices = sorted(
        (part.array, part.offset, part.count) for parts in layout.values() for part in parts if part.count
    )
    for (array, offset, count), (next_array, next_offset, _) in itertools.pairwise(slices):
        if array == next_array and offset + count > next_offset:
            raise ValueError(f"elements of {array} from {next_offset} are in two parts")
    return layout


def parse_part(document: Any) -> Part:
    """Parse a part as it is listed in JSON. Raises ValueError, TypeError."""
    array, offset, count, stored = document
    if stored not in NUMPY_TYPES:
        raise ValueError(f"type {stored!r}, expected one of {', '.join(NUMPY_TYPES)}")
    if type(offset) is not int or type(count) is not int or offset < 0 or count < 0:
        raise ValueError(f"{count!r} elements from {offset!r}")
    return Part(checked_name(array, "a layout"), offset, count, stored)


@dataclass
class ArchiveStorage:
    """The files of a record, rebuilt from a zarr store; see Storage. `location` is for messages.

    `pictures` are those of the steps whose layouts were read.
    """

    location: str
    objects: Objects
    layouts: dict[str, Layout] = field(default_factory=dict)
    pictures: Layout = field(default_factory=dict)
    arrays: dict[str, ArchivedArray] = field(default_factory=dict)

    def names(self, folder: str) -> list[str]:
        """See Storage."""
        if folder == "":
            folders = {STEPS_FOLDER, ANCHORS_FOLDER}.intersection(self.children(""))
            folders |= {IMAGES_FOLDER} if self.names(IMAGES_FOLDER) else set()
            return [*self.layout_of("")[0], *sorted(folders)]
        if folder == IMAGES_FOLDER:
            for step in self.children(STEPS_FOLDER):
                if step_number(step) is not None:
                    self.layout_of(f"{STEPS_FOLDER}/{step}/")
            return [name.removeprefix(f"{IMAGES_FOLDER}/") for name in self.pictures]
        if folder in (STEPS_FOLDER, ANCHORS_FOLDER):
            return self.children(folder)
        layout, below = self.layout_of(folder + "/")
        return sorted({name[len(below) :].split("/")[0] for name in layout if name.startswith(below)})

    def size(self, file: str) -> int | None:
        """See Storage."""
        layout, name = self.layout_of(file)
        return sum(part.size_bytes for part in layout[name]) if name in layout else None

    def read(self, file: str, offset: int = 0, size_bytes: int | None = None) -> bytes | bytearray:
        """See Storage. Raises DamagedRecord."""
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

    def part(self, file: str, part: Part) -> bytearray:
        """Return the bytes of a part as in the file. Raises DamagedRecord, which names the file."""
        try:
            if part.array not in self.arrays:
                self.arrays[part.array] = open_array(self.objects, part.array)
            array = self.arrays[part.array]
            if array.dtype != NUMPY_TYPES[part.stored]:
                raise DamagedRecord(file, f"has {part.stored} in {part.array}, an array of {array.dtype}")
            return array.read(part.offset, part.count)
        except DamagedRecord as error:
            raise DamagedRecord(file, error.what) from None

    def layout_of(self, file: str) -> tuple[Layout, str]:
        """Return the layout of the step or anchor that contains the file, and its name there.

        The layout is empty if there is no such step or anchor.
        """
        folder, name = "", file
        if file.startswith(f"{IMAGES_FOLDER}/"):  # the step that names it has been read
            return self.pictures, file
        if file.count("/") > 1:
            top, number, name = file.split("/", 2)
            folder = f"{top}/{number}"
        if folder not in self.layouts:
            found = self.read_layout(folder)
            if found is None:  # not cached: the run may still be recording
                return {}, name
            shared = {path for path in found if path.startswith(f"{IMAGES_FOLDER}/")} if folder else set()
            self.pictures.update({path: found[path] for path in shared})
            self.layouts[folder] = {path: parts for path, parts in found.items() if path not in shared}
        return self.layouts[folder], name

    def read_layout(self, folder: str) -> Layout | None:
        """Return the layout that a group's attributes refer to, None if there is no such group."""
        document = read_metadata(self.objects, folder)
        if document is None:
            return None
        file = f"{folder}/zarr.json" if folder else "zarr.json"
        try:
            where = parse_part(document["attributes"][LAYOUT_ATTRIBUTE])
            if where.size_bytes > MAX_LAYOUT_BYTES:
                raise ValueError(f"{where.size_bytes} bytes, at most {MAX_LAYOUT_BYTES}")
            return parse_layout(bytes(self.part(file, where)), file)
        except DamagedRecord:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedRecord(file, f"does not refer to a layout: {reason(error)}") from None

    def children(self, folder: str) -> list[str]:
        """List the names below a group, with one listing and without reading the entries."""
        names = (name for name in self.objects.names(folder) if not UNFINISHED_OBJECT.fullmatch(name))
        return [checked_name(name, self.location) for name in names if name != "zarr.json"]


def open_archive(location: str) -> ArchiveStorage:
    """Open the archive at a folder, zip file or URL.

    Raises RecordNotFound, NotARecord, UnknownFormat, DamagedRecord.
    """
    objects = open_objects(location)
    document = read_metadata(objects, "")
    if document is None:
        found = objects.names("")
        if {".zgroup", ".zattrs", ".zarray", ".zmetadata"}.intersection(found):
            raise NotARecord(f"{location} is a store of zarr v2: archives of records are zarr v3")
        if found:
            names = ", ".join(sorted(found)[:3])
            raise NotARecord(
                f"{location} has {names} and no zarr.json: unpack it if it has a record's folder"
            )
        raise RecordNotFound(f"no archive exists at {location}: give the path or URL of a record")
    attributes = document.get("attributes")
    if not isinstance(attributes, dict) or VERSION_ATTRIBUTE not in attributes:
        raise NotARecord(f"{location} is a zarr store, but not a finished archive of a record")
    if (version := attributes[VERSION_ATTRIBUTE]) != ARCHIVE_VERSION:
        raise UnknownFormat(
            f"{location} is an archive of version {version}, this version of areal-debug reads {ARCHIVE_VERSION}: "
            "install the version that wrote it"
        )
    return ArchiveStorage(location, objects)


def local_copy(storage: ArchiveStorage, folder: str) -> Path:
    """Copy an anchor to this user's temporary folder, named by its checksums.

    All ranks of a machine share the copy, and so do later replays. A confined child reads the
    archive. Raises DamagedRecord, RecordError.
    """
    document = bytes(storage.read(f"{folder}/{ANCHOR_FILE}"))
    place = private_folder() / hashlib.sha256(document).hexdigest()[:16]
    while not place.exists():
        try:
            with unfinished_folder(place) as content:
                if not place.exists():
                    in_child(
                        lambda: copy_anchor(storage, folder, content), [storage.location], content.parent
                    )
        except FolderInUse:  # another rank copies it
            time.sleep(0.1)
    return place


def copy_anchor(storage: ArchiveStorage, folder: str, content: Path) -> None:
    """Write the files that anchor.json lists, and check them. Raises DamagedRecord."""
    file = f"{folder}/{ANCHOR_FILE}"
    manifest = parse_anchor(parse_checksummed(bytes(storage.read(file)), file), file)
    for name, entry in manifest.files.items():
        if write_file(storage, f"{folder}/{name}", content.parent) != entry.crc32c:
            raise DamagedRecord(f"{folder}/{name}", f"bytes do not match their crc32c {entry.crc32c}")
    write_file(storage, file, content.parent)
    (content.parent / folder).rename(content)


def private_folder() -> Path:
    """Return this user's folder in the temporary folder; made if absent.

    Raises RecordError if another user could replace the weights in it.
    """
    home = Path(tempfile.gettempdir()) / f"areal-debug-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        home.mkdir(mode=0o700)
    facts = home.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise RecordError(
            f"{home} belongs to another user, or others may write into it: set TMPDIR to a folder of your own"
        )
    return home
