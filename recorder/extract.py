"""Extract an archive into the folder of files that it was made from, bit for bit."""

import os
from collections.abc import Callable
from pathlib import Path

from recorder.errors import RecordExists
from recorder.format import ANCHOR_FILE, ANCHORS_FOLDER, STEP_FILE, STEPS_FOLDER, step_name
from recorder.reader import Record, open_record
from recorder.sealed import commit_file, sync, write_durably
from recorder.storage import file_blocks, walk


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
