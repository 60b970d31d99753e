"""Convert a record into one densely packed archive.

    archive   files ─> parts in an ArrayStream, full shards only ─> close ─> one group a step ─> root attributes, the commit

`extract` has the other direction. The layouts of files are also those of an archive that a run
records into (`live_archive`).
"""

import os
import shutil
import zipfile
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import zarr
from zarr.core.group import GroupMetadata

from areal_core.safety.durable import sync
from areal_core.safety.scratch import unfinished_folder
from recorder.archive.array_streams import ArrayStream, create_group
from recorder.archive_storage import (
    ARCHIVE_VERSION,
    LAYOUT_ATTRIBUTE,
    UNFINISHED_OBJECT,
    VERSION_ATTRIBUTE,
    Layout,
    Part,
    file_system,
    layout_bytes,
)
from recorder.confine import OnStep, Progress, in_child, no_progress
from recorder.errors import DamagedRecord, RecordExists
from recorder.format import (
    ANCHOR_FILE,
    ANCHORS_FOLDER,
    STEP_FILE,
    STEPS_FOLDER,
    BatchEntry,
    parse_anchor,
    step_name,
)
from recorder.lock import check_not_in_use
from recorder.pictures.named import picture_file
from recorder.reader import Damage, Record, open_record, read_checksummed, top_files
from recorder.storage import STAGING_SUFFIX, Storage, file_blocks, is_url, location_of
from recorder.verify import refused, steps_to_copy, verify

DOCUMENTS, CHECKPOINTS, PICTURES = "documents", "checkpoints", "pictures"


def file_layout(stream: ArrayStream, storage: Storage, file: str, batch: BatchEntry | None) -> list[Part]:
    if batch is None:
        column = CHECKPOINTS if file.startswith(ANCHORS_FOLDER) else DOCUMENTS
        if storage.size(file) is None:  # a link, which could name any file of the user
            raise DamagedRecord(file, "is missing or no regular file: nothing else is archived")
        return [stream.append(column, "U8", block) for block in file_blocks(storage, file)]
    tensors = sorted(batch.tensors.items(), key=lambda item: item[1].offset)
    return [stream.append(DOCUMENTS, "U8", storage.read(file, 0, batch.header_bytes))] + [
        stream.append(
            f"{name}.{entry.stored}", entry.stored, storage.read(file, entry.offset, entry.size_bytes)
        )
        for name, entry in tensors
    ]


def step_layout(stream: ArrayStream, record: Record, step: int, pictures: Layout | None = None) -> Layout:
    pictures = {} if pictures is None else pictures
    recorded = record.step(step)
    manifest = recorded.manifest
    named = recorded.named_pictures()
    new = {name: size for name, size in named.items() if picture_file(name) not in pictures}
    if new:  # in one call: each may start a shard
        data = b"".join(recorded.picture(name, size) for name, size in new.items())
        where = stream.append(PICTURES, "U8", data)
        for name, end in zip(new, accumulate(new.values()), strict=True):
            part = Part(where.array, where.offset + end - new[name], new[name], "U8")
            pictures[picture_file(name)] = [part]
    names = [*manifest.batches, *manifest.files]
    folder = f"{STEPS_FOLDER}/{step_name(step)}"
    layout = {
        name: file_layout(stream, recorded.storage, f"{folder}/{name}", manifest.batches.get(name))
        for name in names
    }
    layout[STEP_FILE] = file_layout(stream, record.storage, f"{folder}/{STEP_FILE}", None)
    return layout | {picture_file(name): pictures[picture_file(name)] for name in named}


def anchor_layout(stream: ArrayStream, record: Record, anchor: int) -> Layout:
    folder = f"{ANCHORS_FOLDER}/{step_name(anchor)}"
    file = f"{folder}/{ANCHOR_FILE}"
    manifest = parse_anchor(read_checksummed(record.storage, file), file)
    names = [*manifest.files, ANCHOR_FILE]
    return {name: file_layout(stream, record.storage, f"{folder}/{name}", None) for name in names}


def top_layout(stream: ArrayStream, storage: Storage, without: Collection[str] = ()) -> Layout:
    names = [name for name in top_files(storage) if name not in without]
    return {name: file_layout(stream, storage, name, None) for name in names}


def commit_layout(group: zarr.Group, folder: str, layout: Part) -> None:
    """Commit a step or anchor to the archive by creating one object atomically."""
    group.create_group(folder, attributes=attributes_of(layout))


def attributes_of(layout: Part) -> dict[str, Any]:
    return {LAYOUT_ATTRIBUTE: list(vars(layout).values())}


def commit_top(group: zarr.Group, layout: Part) -> None:
    """Commit the files at the top by replacing one object atomically: both attributes or none."""
    group.update_attributes({VERSION_ATTRIBUTE: ARCHIVE_VERSION, **attributes_of(layout)})


def write_archive(
    record: Record, location: str, anchors: bool, on_step: OnStep, without: Collection[str] = ()
) -> tuple[int, int, int]:
    """Write a record, with its anchors or without, into a store without metadata.

    Files at the top and anchors of which a file is in `without` are left out.
    Return the bytes of the archived files, the number of shards that were there, and the tokens.
    The root's attributes are written last: a store without them is not an archive.
    """
    group = create_group(location)
    stream = ArrayStream(group, "all", packed=True, leftover=None if is_url(location) else Path(location))
    layouts: dict[str, Part] = {}
    sizes: dict[str, int] = {}
    pictures: Layout = {}

    def add(folder: str, layout: Layout) -> None:
        for name, parts in layout.items():
            place = name if name in pictures else f"{folder}/{name}"
            sizes[place] = sum(part.size_bytes for part in parts)
        layouts[folder] = stream.append(DOCUMENTS, "U8", layout_bytes(layout))

    add("", top_layout(stream, record.storage, without))
    for step in record.steps:
        add(f"{STEPS_FOLDER}/{step_name(step)}", step_layout(stream, record, step, pictures))
        on_step(step)
    for anchor in record.anchors() if anchors else ():
        folder = f"{ANCHORS_FOLDER}/{step_name(anchor)}"
        if not any(place.startswith(f"{folder}/") for place in without):
            add(folder, anchor_layout(stream, record, anchor))
    stream.close()
    top = layouts.pop("")
    nodes: dict[str, Any] = {
        folder: GroupMetadata(attributes=attributes_of(layout)) for folder, layout in layouts.items()
    }
    deque(zarr.create_hierarchy(store=group.store, nodes=nodes), maxlen=0)  # one by one takes twice as long
    if not is_url(location):
        for path in (Path(location), *Path(location).rglob("*")):
            sync(path)
    commit_top(group, top)
    tokens = [
        column.end for path, column in stream.columns.items() if path.startswith(f"{stream.name}/input_ids.")
    ]
    return sum(sizes.values()), stream.num_kept, sum(tokens)


@dataclass(frozen=True)
class Archived:
    """Result of `archive_record`, with the sizes of archive and source.

    `num_continued` shards of at most 16 MiB were left by an interrupted call. `left_out` has a
    sentence for each file of the source that is damaged, and for each that is not part of a record.
    """

    location: str
    num_steps: int
    num_tokens: int
    source_bytes: int
    archive_bytes: int
    num_continued: int
    left_out: Sequence[str] = ()
    is_damaged: bool = False


def archive_record(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    overwrite: bool = False,
    progress: Progress = no_progress,
    anchors: bool = True,
    skip_damaged: bool = False,
) -> Archived:
    """Archive the committed steps and finished anchors of a record, which may itself be an archive.

    A child process with limits reads and writes; a local archive gets its name when it is complete.
    Every byte is checked first.

    Args:
        destination: a folder, a file that ends in `.zip`, or an fsspec URL.
        overwrite: replace an existing archive at the destination.
        progress: called in the child with the number of steps and the work.
        anchors: False leaves them out: replays then start from the model of the run.
        skip_damaged: leave out the steps, anchors and other files that are damaged.

    Raises:
        RecordExists: the destination is not empty.
        RecordError: the source is not a record or is damaged.
        LimitReached, OSError: nothing is left behind.
    """
    location = location_of(destination)
    check_destination(location, overwrite)
    if is_url(location):
        clear_destination(location, overwrite)
        work = partial(pack, source, location, progress, anchors, skip_damaged)
        return Archived(**in_child(work, [source, location]))
    check_not_in_use(Path(location + STAGING_SUFFIX))
    with unfinished_folder(Path(location), may_continue=True) as content:
        target = f"{content}.zip" if location.endswith(".zip") else str(content)
        work = partial(pack, source, target, progress, anchors, skip_damaged)
        facts = in_child(work, [source], content.parent)
        if target != str(content):
            Path(target).rename(content)
    return Archived(**facts | {"location": location})


def pack(
    source: str | os.PathLike[str], location: str, progress: Progress, anchors: bool, skip_damaged: bool
) -> dict[str, Any]:
    """Write an archive, or continue one that was interrupted; return the members of Archived."""
    record = open_record(source, Damage())
    problems = [problem for problem in verify(source).problems if problem.kind != "unfinished"]
    damaged = [problem for problem in problems if problem.kind != "foreign"]
    if damaged and not skip_damaged:
        raise refused(damaged[0])
    if damaged:
        record = replace(record, steps=steps_to_copy(record, record.steps, skip_damaged)[0])
    is_zip = location.endswith(".zip") and not is_url(location)
    store = Path(location).with_suffix(".zarr") if is_zip else location
    source_bytes = num_continued = num_tokens = 0
    if not is_url(location):
        remove_metadata(Path(store))

    def write(on_step: OnStep) -> None:
        nonlocal source_bytes, num_continued, num_tokens
        without = {problem.file for problem in damaged}
        source_bytes, num_continued, num_tokens = write_archive(record, str(store), anchors, on_step, without)

    progress(len(record.steps), write)
    if is_zip:
        zip_folder(Path(store), Path(location))
        shutil.rmtree(store)
    return {
        "location": location,
        "num_steps": len(record.steps),
        "num_tokens": num_tokens,
        "source_bytes": source_bytes,
        "archive_bytes": stored_bytes(location),
        "num_continued": num_continued,
        "left_out": [str(problem) for problem in problems],
        "is_damaged": bool(damaged),
    }


def remove_metadata(store: Path) -> None:
    for path in list(sorted_files(store)):
        if path.parent.name != "c" or not path.name.isdecimal():
            path.unlink()


def stored_bytes(location: str) -> int:
    if is_url(location):
        files, path = file_system(location)
        return int(files.du(path))
    place = Path(location)
    return sum(path.stat().st_size for path in (sorted_files(place) if place.is_dir() else [place]))


def check_destination(location: str, overwrite: bool) -> None:
    """Raise RecordExists unless the destination is empty, or an archive and `overwrite` is set."""
    if is_url(location):
        files, path = file_system(location)
        if overwrite or not files.exists(path) or not files.ls(path):
            return
    else:
        place = Path(location)
        if not place.exists() or (place.is_dir() and all(map(is_unfinished_object, place.iterdir()))):
            return
        is_archive = (place / "zarr.json").is_file() or (place.is_file() and zipfile.is_zipfile(place))
        if overwrite and is_archive:
            return
    raise RecordExists(f"{location} exists already: choose another place, or --force to replace an archive")


def is_unfinished_object(path: Path) -> bool:
    return UNFINISHED_OBJECT.fullmatch(path.name) is not None and path.is_file()


def clear_destination(location: str, overwrite: bool) -> None:
    """Remove what `check_destination` allows to replace. Raises RecordExists."""
    check_destination(location, overwrite)
    if is_url(location):
        files, path = file_system(location)
        if files.exists(path) and files.ls(path):
            files.rm(path, recursive=True)
    elif Path(location).is_dir():
        shutil.rmtree(location)
    else:
        Path(location).unlink(missing_ok=True)


def zip_folder(folder: Path, file: Path) -> None:
    """Zip a folder without compression: its chunks are compressed already."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted_files(folder):
            archive.write(path, path.relative_to(folder).as_posix())
    sync(file)


def sorted_files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
