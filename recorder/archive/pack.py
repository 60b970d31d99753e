"""Convert a record into one densely packed archive, and an archive back into the same files.

    archive   files ─> parts in an ArrayStream, full shards only ─> close ─> one group a step ─> root attributes, the commit
    extract   parts ─> files, bit for bit; the file that commits a step or an anchor is written last

The layouts of files are also those of an archive that a run records into (`live_archive`).
"""

import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import zarr

from areal_core.safety.durable import commit_file, sync, write_durably
from recorder.archive.columns import ArrayStream, create_group
from recorder.archive.objects import file_system
from recorder.archive.store import (
    ARCHIVE_VERSION,
    LAYOUT_ATTRIBUTE,
    VERSION_ATTRIBUTE,
    Layout,
    Part,
    layout_bytes,
)
from recorder.errors import RecordExists
from recorder.format import (
    ANCHOR_FILE,
    ANCHORS_FOLDER,
    STEP_FILE,
    STEPS_FOLDER,
    BatchEntry,
    is_lock_file,
    step_name,
)
from recorder.lock import writing_archive
from recorder.reader import Record, open_record
from recorder.storage import Storage, file_blocks, is_url, location_of, walk

DOCUMENTS, CHECKPOINTS = "documents", "checkpoints"


def file_layout(stream: ArrayStream, storage: Storage, file: str, batch: BatchEntry | None) -> list[Part]:
    """Append a file to a stream: safetensors as header and tensors, other files as bytes."""
    if batch is None:
        column = CHECKPOINTS if file.startswith(ANCHORS_FOLDER) else DOCUMENTS
        return [stream.append(column, "U8", block) for block in file_blocks(storage, file)]
    tensors = sorted(batch.tensors.items(), key=lambda item: item[1].offset)
    return [stream.append(DOCUMENTS, "U8", storage.read(file, 0, batch.header_bytes))] + [
        stream.append(
            f"{name}.{entry.stored}", entry.stored, storage.read(file, entry.offset, entry.size_bytes)
        )
        for name, entry in tensors
    ]


def step_layout(stream: ArrayStream, record: Record, step: int) -> Layout:
    """Append the files of a step to a stream."""
    manifest = record.step(step).manifest
    names = [*manifest.batches, *manifest.files]
    folder = f"{STEPS_FOLDER}/{step_name(step)}"
    layout = {
        name: file_layout(stream, record.storage, f"{folder}/{name}", manifest.batches.get(name))
        for name in names
    }
    return layout | {STEP_FILE: file_layout(stream, record.storage, f"{folder}/{STEP_FILE}", None)}


def folder_layout(stream: ArrayStream, record: Record, folder: str) -> Layout:
    """Append all files under a folder to a stream."""
    names = walk(record.storage, folder)
    return {name: file_layout(stream, record.storage, f"{folder}/{name}", None) for name in names}


def top_layout(stream: ArrayStream, storage: Storage) -> Layout:
    """Append the files at the top of a record, such as record.json, to a stream."""
    names = [n for n in storage.names("") if storage.size(n) is not None and not is_lock_file(n)]
    return {name: file_layout(stream, storage, name, None) for name in names}


def commit_layout(group: zarr.Group, folder: str, layout: Part) -> None:
    """Commit a step or anchor to the archive by creating one object atomically."""
    group.create_group(folder, attributes={LAYOUT_ATTRIBUTE: list(vars(layout).values())})


def write_archive(record: Record, location: str, on_step: Callable[[int], None]) -> None:
    """Write a record into an empty store.

    The root's attributes are written last: a store without them is not an archive.
    """
    group = create_group(location)
    stream = ArrayStream(group, "all", packed=True)
    layouts: dict[str, Part] = {}

    def add(folder: str, layout: Layout) -> None:
        layouts[folder] = stream.append(DOCUMENTS, "U8", layout_bytes(layout))

    add("", top_layout(stream, record.storage))
    for step in record.steps:
        add(f"{STEPS_FOLDER}/{step_name(step)}", step_layout(stream, record, step))
        on_step(step)
    for anchor in record.anchors():
        folder = f"{ANCHORS_FOLDER}/{step_name(anchor)}"
        add(folder, folder_layout(stream, record, folder))
    stream.close()
    for folder in layouts.keys() - {""}:
        commit_layout(group, folder, layouts[folder])
    if not is_url(location):
        sync_files(Path(location))
    group.attrs.update(
        {VERSION_ATTRIBUTE: ARCHIVE_VERSION, LAYOUT_ATTRIBUTE: list(vars(layouts[""]).values())}
    )


@dataclass(frozen=True)
class Archived:
    """Result of `archive_record`, with the sizes of archive and source."""

    location: str
    num_steps: int
    num_tokens: int
    source_bytes: int
    archive_bytes: int


def archive_record(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    overwrite: bool = False,
    on_step: Callable[[int], None] = lambda step: None,
) -> Archived:
    """Archive the committed steps and finished anchors of a record, which may itself be an archive.

    Args:
        destination: a folder, a file that ends in `.zip`, or an fsspec URL.
        overwrite: replace an existing archive at the destination.

    Raises:
        RecordExists: the destination is not empty.
        RecordError: the source is not a record or is damaged.
    """
    record, location = open_record(source), location_of(destination)
    with writing_archive(location, "record archive"):
        clear_destination(location, overwrite)
        if location.endswith(".zip") and not is_url(location):
            unzipped = Path(location + ".tmp")
            shutil.rmtree(unzipped, ignore_errors=True)
            try:
                write_archive(record, str(unzipped), on_step)
                zip_folder(unzipped, Path(location))
            finally:
                shutil.rmtree(unzipped, ignore_errors=True)
        else:
            write_archive(record, location, on_step)
    steps = [record.step(step) for step in record.steps]
    return Archived(
        location=location,
        num_steps=len(steps),
        num_tokens=sum(
            step.batch_entry(rank)[1].num_tokens for step in steps for rank in range(step.manifest.num_ranks)
        ),
        source_bytes=sum(record.storage.size(file) or 0 for file in walk(record.storage, "")),
        archive_bytes=stored_bytes(location),
    )


def stored_bytes(location: str) -> int:
    """Total size in bytes of all objects at a location."""
    if is_url(location):
        files, path = file_system(location)
        return int(files.du(path))
    place = Path(location)
    return sum(path.stat().st_size for path in (sorted_files(place) if place.is_dir() else [place]))


def clear_destination(location: str, overwrite: bool) -> None:
    """Raise RecordExists unless the destination is empty, or an archive and `overwrite` is set."""
    if is_url(location):
        files, path = file_system(location)
        if not files.exists(path) or not files.ls(path):
            return
        if overwrite:
            files.rm(path, recursive=True)
            return
    else:
        place = Path(location)
        if not place.exists() or (place.is_dir() and not any(place.iterdir())):
            return
        if overwrite and (place / "zarr.json").is_file():
            shutil.rmtree(place)
            return
        if overwrite and place.is_file() and zipfile.is_zipfile(place):
            place.unlink()
            return
    raise RecordExists(f"{location} exists already: choose another place, or --force to replace an archive")


def zip_folder(folder: Path, file: Path) -> None:
    """Zip a folder, atomically and without compression: its chunks are compressed already."""
    unfinished = file.with_name(file.name + ".part")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted_files(folder):
            archive.write(path, path.relative_to(folder).as_posix())
    sync(unfinished)
    unfinished.rename(file)
    sync(file.parent)


def sorted_files(folder: Path) -> Iterator[Path]:
    """All files under a folder, sorted."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def sync_files(folder: Path) -> None:
    """Fsync every file and folder under a folder."""
    for path in (folder, *folder.rglob("*")):
        sync(path)


def extract_record(
    source: str | os.PathLike[str],
    destination: Path,
    on_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Write the files of a record, usually an archive, into a folder that is absent or empty.

    The files that commit the record, a step or an anchor are written last, as when recording.
    Raises RecordExists, and RecordError for the source.
    """
    record = open_record(source)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise RecordExists(f"{destination} exists already: choose another folder")
    destination.mkdir(parents=True, exist_ok=True)
    for name in record.storage.names(""):
        if record.storage.size(name) is not None:
            commit_file(destination / name, bytes(record.storage.read(name)))
    for step in record.steps:
        extract_folder(record, f"{STEPS_FOLDER}/{step_name(step)}", STEP_FILE, destination)
        on_step(step)
    for anchor in record.anchors():
        extract_folder(record, f"{ANCHORS_FOLDER}/{step_name(anchor)}", ANCHOR_FILE, destination)


def extract_folder(record: Record, folder: str, last: str, destination: Path) -> None:
    """Write a step or an anchor, its committing file last."""
    for name in walk(record.storage, folder):
        path = destination / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name != last:
            write_durably(path, *file_blocks(record.storage, f"{folder}/{name}"))
    sync(destination / folder)
    commit_file(destination / folder / last, bytes(record.storage.read(f"{folder}/{last}")))
