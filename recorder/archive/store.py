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
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import stat
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_core.safety.file_names import checked_name
from areal_core.safety.scratch import FolderInUse, unfinished_folder
from recorder.archive.arrays import ArchivedArray, open_array, read_metadata
from recorder.archive.confined import in_child, write_file
from recorder.archive.objects import Objects, open_objects
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
            return parse_layout(bytes(self.part(folder, where)), file)
        except DamagedRecord:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedRecord(file, f"does not refer to a layout ({error})") from None

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
