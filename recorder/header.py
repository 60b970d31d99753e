"""The folder of a record and its record.json: check the folder, describe the run."""

import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from recorder.environment import environment, folder_identity
from recorder.errors import RecordExists
from recorder.format import (
    ANCHORS_FOLDER,
    FORMAT_VERSION,
    GAPS_FILE,
    RECORD_FILE,
    STEPS_FOLDER,
    UNFINISHED_FILES,
    RecordHeader,
    Recording,
)
from recorder.sealed import checksummed_bytes, commit_file


def check_folder(folder: Path, overwrite: bool) -> None:
    """Raise RecordExists unless a record may be written here.

    The folder must be absent or empty, or be a record if `overwrite` is set.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise RecordExists(f"{folder} is a file: give a folder to record into")
    names = {path.name for path in folder.iterdir()}
    if RECORD_FILE in names and not overwrite:
        raise RecordExists(
            f"{folder} already holds a record: choose another folder, or replace it with --force (debug.overwrite=true)"
        )
    allowed = {RECORD_FILE, GAPS_FILE, STEPS_FOLDER, ANCHORS_FOLDER} if RECORD_FILE in names else set()
    if foreign := sorted(names - allowed - UNFINISHED_FILES):
        raise RecordExists(
            f"{folder} contains {foreign}, which is not part of a record: choose another folder"
        )


def clear_record(folder: Path) -> None:
    """Create the folder, or remove the record in it.

    record.json is removed last: a partially cleared folder is still a record.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (STEPS_FOLDER, ANCHORS_FOLDER):
        if (folder / name).exists():
            shutil.rmtree(folder / name)
    for name in (*UNFINISHED_FILES, GAPS_FILE, RECORD_FILE):
        (folder / name).unlink(missing_ok=True)


def describe_run(facts: Mapping[str, Any], recording: Recording = Recording()) -> RecordHeader:
    """Build the header of a run from the facts of its `start` event."""
    config, tokenizer = facts["config"], facts["tokenizer"]
    return RecordHeader(
        format_version=FORMAT_VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        world_size=facts["world_size"],
        num_ranks=facts["data_parallel_size"],
        allocation=config.get("allocation_mode"),
        model=folder_identity(str(facts["model_path"])),
        tokenizer=None if tokenizer is None else folder_identity(str(tokenizer.name_or_path)),
        environment=environment(),
        config=config,
        recording=recording,
    )


def write_header(folder: Path, header: RecordHeader) -> None:
    """Commit record.json."""
    commit_file(folder / RECORD_FILE, checksummed_bytes(vars(header)))
