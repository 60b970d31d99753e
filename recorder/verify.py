"""Reads every byte of a record and names each one that is not as written: which file, which tensor."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from recorder.environment import file_identity
from recorder.errors import DamagedRecord, NotARecord, RecordNotFound
from recorder.format import (
    ANCHOR_FILE,
    ANCHORS_FOLDER,
    RECORD_FILE,
    STEP_FILE,
    STEP_NAME,
    STEPS_FOLDER,
    BatchEntry,
    FileEntry,
    parse_anchor,
    parse_header,
    parse_step,
    step_name,
)
from recorder.reader import step_folders
from recorder.sealed import unseal
from recorder.tensors import check_header, checked_bytes


@dataclass(frozen=True)
class Problem:
    """Something that is not as it was written; `tensor` is None where a whole file is meant."""

    file: str
    tensor: str | None
    what: str


@dataclass(frozen=True)
class VerifyReport:
    """`steps_missing` were begun and not finished, or lie in a gap between the steps that are there."""

    problems: tuple[Problem, ...]
    steps_ok: tuple[int, ...]
    steps_missing: tuple[int, ...]

    @property
    def intact(self) -> bool:
        """No problem was found."""
        return not self.problems


def verify(path: str | os.PathLike[str], on_step: Callable[[int], None] = lambda step: None) -> VerifyReport:
    """Checks a whole record; calls `on_step` after each step. Damage is reported and never raised.

    Raises RecordNotFound and NotARecord, and UnknownFormat for a version that cannot be checked.
    """
    folder = Path(path)
    if not folder.exists():
        raise RecordNotFound(f"{folder} does not exist: give the folder that a run recorded into")
    if not any((folder / name).exists() for name in (RECORD_FILE, STEPS_FOLDER)):
        raise NotARecord(f"{folder} holds no {RECORD_FILE}: give the folder that a run recorded into")
    problems = [*header_problems(folder), *layout_problems(folder)]
    steps = step_folders(folder)
    missing = sorted(set(range(steps[0], steps[-1])) - set(steps)) if steps else []
    problems += [Problem(f"{STEPS_FOLDER}/{step_name(step)}", None, "is missing") for step in missing]
    steps_ok = []
    for step in steps:
        found = list(step_problems(folder, step))
        problems += found
        if not found:
            steps_ok.append(step)
        elif not (folder / STEPS_FOLDER / step_name(step) / STEP_FILE).is_file():
            missing.append(step)
        on_step(step)
    problems += [problem for anchor in anchor_folders(folder) for problem in anchor_problems(folder, anchor)]
    return VerifyReport(tuple(problems), tuple(steps_ok), tuple(sorted(missing)))


def damage(error: DamagedRecord) -> Problem:
    """The problem that a reader's error describes."""
    return Problem(error.file, error.tensor, error.what)


def header_problems(folder: Path) -> Iterator[Problem]:
    """What is wrong with record.json."""
    try:
        if not (folder / RECORD_FILE).is_file():
            raise DamagedRecord(RECORD_FILE, "is missing")
        parse_header(unseal((folder / RECORD_FILE).read_bytes(), RECORD_FILE))
    except DamagedRecord as error:
        yield damage(error)


def layout_problems(folder: Path) -> Iterator[Problem]:
    """Entries that are no part of a record, at the top and among the steps and anchors."""
    known = {RECORD_FILE, STEPS_FOLDER, ANCHORS_FOLDER}
    yield from (unexpected(path.name) for path in sorted(folder.iterdir()) if path.name not in known)
    for name in (STEPS_FOLDER, ANCHORS_FOLDER):
        entries = sorted((folder / name).iterdir()) if (folder / name).is_dir() else []
        yield from (
            unexpected(f"{name}/{path.name}") for path in entries if not STEP_NAME.fullmatch(path.name)
        )


def unexpected(file: str) -> Problem:
    """A file or folder that the record does not list."""
    return Problem(file, None, "is no part of the record")


def step_problems(folder: Path, step: int) -> Iterator[Problem]:
    """What is wrong with a step; without step.json nothing else in it can be judged."""
    name = f"{STEPS_FOLDER}/{step_name(step)}"
    path = folder / name
    if not (path / STEP_FILE).is_file():
        yield Problem(f"{name}/{STEP_FILE}", None, "is missing: the step was not finished")
        return
    try:
        file = f"{name}/{STEP_FILE}"
        manifest = parse_step(unseal((path / STEP_FILE).read_bytes(), file), file)
        if manifest.step != step:
            raise DamagedRecord(file, f"belongs to step {manifest.step}: a folder was renamed")
    except DamagedRecord as error:
        yield damage(error)
        return
    for file, batch in manifest.batches.items():
        yield from batch_problems(path / file, f"{name}/{file}", batch)
    for file, entry in manifest.files.items():
        yield from file_problems(path / file, f"{name}/{file}", entry)
    known = {STEP_FILE, *manifest.batches, *manifest.files}
    yield from (
        unexpected(f"{name}/{entry.name}") for entry in sorted(path.iterdir()) if entry.name not in known
    )


def batch_problems(path: Path, file: str, entry: BatchEntry) -> Iterator[Problem]:
    """Each damaged tensor of a batch file, and its header."""
    try:
        check_header(path, file, entry)
    except DamagedRecord as error:
        yield damage(error)
        if not path.is_file():
            return
    for name, tensor in entry.tensors.items():
        try:
            checked_bytes(path, file, name, tensor)
        except DamagedRecord as error:
            yield Problem(error.file, name, error.what)


def file_problems(path: Path, file: str, entry: FileEntry) -> Iterator[Problem]:
    """What is wrong with a file that is checked as a whole."""
    if not path.is_file():
        yield Problem(file, None, "is missing")
        return
    found = FileEntry(**file_identity(path))
    if found.size_bytes != entry.size_bytes:
        what = f"has {found.size_bytes} bytes, {entry.size_bytes} expected: it is cut off or changed"
        yield Problem(file, None, what)
    elif found != entry:
        yield Problem(file, None, f"bytes do not match their crc32c {entry.crc32c}")


def anchor_folders(folder: Path) -> list[str]:
    """Names of the anchors that were finished; an unfinished one is not a part of the record yet."""
    return sorted(path.parent.name for path in (folder / ANCHORS_FOLDER).glob(f"*/{ANCHOR_FILE}"))


def anchor_problems(folder: Path, anchor: str) -> Iterator[Problem]:
    """What is wrong with a finished anchor."""
    name = f"{ANCHORS_FOLDER}/{anchor}"
    try:
        file = f"{name}/{ANCHOR_FILE}"
        manifest = parse_anchor(unseal((folder / file).read_bytes(), file), file)
    except DamagedRecord as error:
        yield damage(error)
        return
    for file, entry in manifest.files.items():
        yield from file_problems(folder / name / file, f"{name}/{file}", entry)
    files = {str(path.relative_to(folder / name)) for path in (folder / name).rglob("*") if path.is_file()}
    yield from (unexpected(f"{name}/{file}") for file in sorted(files - {ANCHOR_FILE, *manifest.files}))
