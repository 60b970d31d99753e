"""The files at the top of a record: record.json describes the run, gaps.json lists missing steps.

A step may be missing because of retention, a slow disk or an interrupted run; any other missing
step is damage. gaps.json is committed before a step is removed, so that no step is ever missing
without its reason.
"""

import os
import shutil
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from areal_core.safety.durable import commit_file, sync
from recorder.documents import Step, checksummed_bytes, parse_as
from recorder.environment import environment, folder_identity
from recorder.errors import DamagedRecord, RecordExists
from recorder.format import (
    ANCHOR_FILE,
    ANCHORS_FOLDER,
    END_FILE,
    FORMAT_VERSION,
    GAPS_FILE,
    IMAGES_FOLDER,
    RECORD_FILE,
    SIGNATURE_FILES,
    STEP_FILE,
    STEPS_FOLDER,
    TOP_FILES,
    UNFINISHED_FILES,
    RecordHeader,
    Recording,
    check_version,
    is_lock_file,
)
from recorder.lock import check_not_in_use

Ranges = tuple[tuple[Step, Step], ...]


def check_folder(folder: Path, overwrite: bool) -> None:
    """Raise RecordInUse or RecordExists unless a record may be written here."""
    check_not_in_use(folder)
    check_contents(folder, overwrite)


def check_contents(folder: Path, overwrite: bool) -> None:
    """Raise RecordExists unless the folder is absent, empty, or, with `overwrite`, a record."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise RecordExists(f"{folder} is a file: give a folder to record into")
    names = {path.name for path in folder.iterdir() if not is_lock_file(path.name)}
    if RECORD_FILE in names and not overwrite and any(folder.glob(f"{STEPS_FOLDER}/*/{STEP_FILE}")):
        raise RecordExists(
            f"{folder} already holds a record: choose another folder, or replace it: "
            "--force, debug.overwrite=true, or Recorder(overwrite=True)"
        )
    allowed = {*TOP_FILES, STEPS_FOLDER, ANCHORS_FOLDER, IMAGES_FOLDER} if RECORD_FILE in names else set()
    steps = folder / STEPS_FOLDER
    if steps.is_dir() and not any(steps.iterdir()):  # of a run that ended before record.json
        allowed.add(STEPS_FOLDER)
    if foreign := sorted(names - allowed - UNFINISHED_FILES):
        raise RecordExists(
            f"{folder} contains {foreign}, which is not part of a record: choose another folder"
        )


def clear_record(folder: Path) -> None:
    """Create the folder, or remove the record in it, but for the lock, which the caller holds.

    record.json is removed last, and the last step first, beginning with the file that commits it: a
    partially cleared folder is still a record, and an intact one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*SIGNATURE_FILES, END_FILE):  # they name steps
        (folder / name).unlink(missing_ok=True)
    for name, committed_by in ((STEPS_FOLDER, STEP_FILE), (ANCHORS_FOLDER, ANCHOR_FILE)):
        if (folder / name).exists():
            for below in sorted(os.listdir(folder / name), reverse=True):
                with suppress(FileNotFoundError, NotADirectoryError):
                    (folder / name / below / committed_by).unlink()
            shutil.rmtree(folder / name)
    if (folder / IMAGES_FOLDER).exists():  # after the steps that name them
        shutil.rmtree(folder / IMAGES_FOLDER)
    for name in (*UNFINISHED_FILES, *TOP_FILES):
        (folder / name).unlink(missing_ok=True)


def describe_run(facts: Mapping[str, Any], recording: Recording = Recording()) -> RecordHeader:
    """Build the header of a run from the facts of its `start` event.

    Another trainer than that of this repository is `trainer`, and its main script `code`. `method`
    is that of a supervised run, `num_rows` of its data set.
    """
    config, tokenizer, model = facts["config"], facts["tokenizer"], facts["model_path"]
    fingerprint = environment(facts["code"]) if "trainer" in facts else environment()
    fingerprint |= {name: facts[name] for name in ("trainer", "method", "num_rows") if name in facts}
    if "computed_by" in facts:
        fingerprint["code"] = fingerprint["code"] | facts["computed_by"]
    if "processor" in facts and facts["processor"] is not None:
        fingerprint |= {"image_processor": facts["processor"].identity()}
    return RecordHeader(
        format_version=FORMAT_VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        world_size=facts["world_size"],
        num_ranks=facts["data_parallel_size"],
        allocation=config.get("allocation_mode"),
        model={"path": "", "files": {}} if model is None else folder_identity(str(model)),
        tokenizer=None if tokenizer is None else folder_identity(str(tokenizer.name_or_path)),
        environment=fingerprint,
        config=config,
        recording=recording,
    )


def write_header(folder: Path, header: RecordHeader) -> None:
    """Commit record.json, and the folders in which steps commit: they fsync only their own."""
    (folder / STEPS_FOLDER).mkdir(exist_ok=True)
    commit_file(folder / RECORD_FILE, checksummed_bytes(vars(header)))
    with suppress(PermissionError):  # a folder above that may not be listed
        sync(folder.parent)


@dataclass(frozen=True)
class Gaps:
    """`removed` are ascending ranges, both ends included; `dropped` and `lost` are single steps."""

    removed: Ranges = ()
    dropped: tuple[Step, ...] = ()
    lost: tuple[Step, ...] = ()

    def reason(self, step: int) -> str | None:
        """Return the reason why the step is missing, or None if it is unknown."""
        if in_ranges(step, self.removed):
            return "was removed to keep the record within its limits"
        if step in self.dropped:
            return "was dropped because the disk was slower than the run"
        return "was not written before the run was interrupted" if step in self.lost else None

    def with_removed(self, steps: Iterable[int]) -> "Gaps":
        return replace(self, removed=merge_ranges([*self.removed, *((step, step) for step in steps)]))

    def with_dropped(self, steps: Iterable[int]) -> "Gaps":
        return replace(self, dropped=tuple(sorted({*self.dropped, *steps})))


def in_ranges(step: int, ranges: Ranges) -> bool:
    before = bisect_right(ranges, step, key=lambda ends: ends[0])
    return before > 0 and step <= ranges[before - 1][1]


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def parse_gaps(document: dict[str, Any]) -> Gaps:
    """Parse gaps.json, whose checksum has been checked and removed."""
    check_version(document, GAPS_FILE)
    members = {name: value for name, value in document.items() if name != "format_version"}
    gaps = parse_as(Gaps, members, GAPS_FILE)
    ends = [step for ends in gaps.removed for step in ends]
    if ends != sorted(ends):
        raise DamagedRecord(GAPS_FILE, "lists ranges of removed steps that do not ascend")
    return gaps


def write_gaps(record: Path, gaps: Gaps) -> None:
    commit_file(record / GAPS_FILE, checksummed_bytes({"format_version": FORMAT_VERSION} | vars(gaps)))
