"""Write the files of an archive into a folder, bit for bit, and check them against their checksums.

    archive ─> child process ─> DEST's parent/.DEST.unfinished/content ─> steps and anchors checked ─> rename to DEST

A name that is not safe ends the extraction before a file is written. What a killed extraction left
is continued with: a step whose files have their checksums is not written again.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_core.safety.durable import sync
from areal_core.safety.scratch import unfinished_folder
from recorder.confine import OnStep, Progress, in_child, no_progress, write_file
from recorder.errors import DamagedRecord, RecordExists
from recorder.format import ANCHOR_FILE, ANCHORS_FOLDER, STEP_FILE, STEPS_FOLDER, step_name
from recorder.pictures.named import picture_file, read_picture
from recorder.reader import Record, open_record, read_manifest, top_files
from recorder.storage import FolderStorage, Storage, walk
from recorder.verify import Problem, anchor_problems, damage, listed_problems

SOURCE_FILE = "source"  # next to the content: which record it is of


@dataclass(frozen=True)
class Extracted:
    """Result of `extract_record`; `num_continued` steps were left by an interrupted extraction."""

    num_steps: int
    num_continued: int


def extract_record(
    source: str | os.PathLike[str],
    destination: Path,
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> Extracted:
    """Write the files of a record, usually an archive, into a folder.

    A child process with limits reads and writes; the folder gets its name when it is complete.

    Args:
        destination: absent or empty unless `overwrite` is set.
        progress: called in the child with the number of steps and the work.

    Raises:
        RecordExists: the destination is not empty.
        DamagedRecord: a file of the source is damaged or has a name that is not safe.
        RecordError, LimitReached, OSError: as when reading; nothing is left behind.
    """
    occupied = destination.exists() and (not destination.is_dir() or any(destination.iterdir()))
    if occupied and not overwrite:
        raise RecordExists(f"{destination} exists already: choose another folder")
    with unfinished_folder(destination, may_continue=True) as content:
        facts = in_child(lambda: extract(source, content, progress), [source], content.parent)
    return Extracted(**facts)


def extract(source: str | os.PathLike[str], content: Path, progress: Progress) -> dict[str, Any]:
    """Write what is not there yet; return the members of Extracted."""
    record = open_record(source)
    forget_other_source(content, record)
    for name in top_files(record.storage):
        write_file(record.storage, name, content)
    folders = [(f"{STEPS_FOLDER}/{step_name(step)}", STEP_FILE) for step in record.steps]
    anchors = [(f"{ANCHORS_FOLDER}/{step_name(step)}", ANCHOR_FILE) for step in record.anchors()]
    there = [folder for folder, last in folders if is_complete(content, folder, last)]

    def write(on_step: OnStep) -> None:
        for step in record.steps:
            write_pictures(record, step, content)
        for folder, last in (*folders, *anchors):
            if folder not in there:
                shutil.rmtree(content / folder, ignore_errors=True)
                write_folder(record.storage, folder, last, content)
            if last == STEP_FILE:
                on_step(0)

    progress(len(folders), write)
    return {"num_steps": len(folders), "num_continued": len(there)}


def forget_other_source(content: Path, record: Record) -> None:
    """Create the folder, or keep it if an extraction of the same record was interrupted."""
    digest = hashlib.sha256(repr((record.steps, record.anchors())).encode())
    for name in top_files(record.storage):
        digest.update(record.storage.read(name))
    file = content.parent / SOURCE_FILE
    if content.exists() and (not file.exists() or file.read_text() != digest.hexdigest()):
        shutil.rmtree(content)
    content.mkdir(mode=0o700, exist_ok=True)
    file.write_text(digest.hexdigest())


def write_pictures(record: Record, step: int, content: Path) -> None:
    """Write the pictures of a step that are not there yet. Raises DamagedRecord."""
    storage = FolderStorage(content)
    for name, size_bytes in record.step(step).named_pictures().items():
        if storage.size(picture_file(name)) != size_bytes:
            write_file(record.storage, picture_file(name), content)
        read_picture(storage, name, size_bytes)


def is_complete(content: Path, folder: str, last: str) -> bool:
    """Return whether a step was extracted with all of its files."""
    storage = FolderStorage(content)
    return storage.size(f"{folder}/{last}") is not None and not any(problems_of(storage, folder, last))


def problems_of(storage: Storage, folder: str, last: str) -> Iterator[Problem]:
    if last == ANCHOR_FILE:
        yield from anchor_problems(storage, folder)
        return
    try:
        manifest = read_manifest(storage, int(folder.rpartition("/")[2]))
    except DamagedRecord as error:
        yield damage(error)
        return
    yield from listed_problems(storage, folder, manifest)


def write_folder(storage: Storage, folder: str, last: str, content: Path) -> None:
    """Write a step or an anchor, its committing file last. Raises DamagedRecord."""
    for name in walk(storage, folder):
        if name != last:
            write_file(storage, f"{folder}/{name}", content)
    write_file(storage, f"{folder}/{last}", content)
    sync(content / folder)
    for problem in problems_of(FolderStorage(content), folder, last):
        raise DamagedRecord(problem.file, problem.what, problem.tensor)
