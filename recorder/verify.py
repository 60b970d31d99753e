"""Read every byte of a record and report each damaged file and tensor."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from crc32c import crc32c

from recorder.errors import DamagedRecord, NotARecord
from recorder.format import (
    ANCHOR_FILE,
    ANCHORS_FOLDER,
    GAPS_FILE,
    RECORD_FILE,
    STEP_FILE,
    STEP_NAME,
    STEPS_FOLDER,
    UNFINISHED_FILES,
    BatchEntry,
    FileEntry,
    Recording,
    parse_anchor,
    parse_header,
    step_name,
)
from recorder.header import Gaps
from recorder.reader import (
    anchor_steps,
    open_storage,
    read_checksummed,
    read_gaps,
    read_manifest,
    step_folders,
)
from recorder.storage import Storage, file_blocks, walk
from recorder.tensors import check_header, checked_bytes


@dataclass(frozen=True)
class Problem:
    """A file or tensor that differs from what was written; `tensor` is None for a complete file.

    `kind` is "damaged" (bytes are missing or differ), "foreign" (not part of the record) or
    "unfinished" (a last step that was being written when the run ended; committed steps are not
    affected).
    """

    file: str
    tensor: str | None
    what: str
    kind: str = "damaged"

    def __str__(self) -> str:
        place = f"{self.file}, tensor {self.tensor}" if self.tensor else self.file
        return f"{place}: {self.what}"


@dataclass(frozen=True)
class VerifyReport:
    """`steps_missing` are unfinished, or absent between recorded steps for no known reason."""

    problems: tuple[Problem, ...]
    steps_ok: tuple[int, ...]
    steps_missing: tuple[int, ...]

    @property
    def intact(self) -> bool:
        """True if no problem was found."""
        return not self.problems


def verify(path: str | os.PathLike[str], on_step: Callable[[int], None] = lambda step: None) -> VerifyReport:
    """Check a complete record; calls `on_step` after each step.

    Damage is reported and never raised.

    Raises RecordNotFound and NotARecord, and UnknownFormat for a version that cannot be checked.
    """
    storage = open_storage(path)
    if not {RECORD_FILE, STEPS_FOLDER}.intersection(storage.names("")):
        raise NotARecord(f"{path} holds no {RECORD_FILE}: give the folder that a run recorded into")
    recording, gaps, problems = read_top(storage)
    problems += layout_problems(storage)
    steps = step_folders(storage, gaps)
    last_committed = max((s for s in steps if storage.size(step_file(s)) is not None), default=-1)
    missing = unexplained(steps, recording, gaps)
    problems += [Problem(f"{STEPS_FOLDER}/{step_name(step)}", None, "is missing") for step in missing]
    steps_ok = []
    for step in steps:
        found = list(step_problems(storage, step)) if step <= last_committed else [unfinished(step)]
        problems += found
        if not found:
            steps_ok.append(step)
        elif storage.size(step_file(step)) is None:
            missing.append(step)
        on_step(step)
    for step in anchor_steps(storage):
        problems += anchor_problems(storage, f"{ANCHORS_FOLDER}/{step_name(step)}")
    return VerifyReport(tuple(problems), tuple(steps_ok), tuple(sorted(missing)))


def damage(error: DamagedRecord) -> Problem:
    """Convert a reader's error into a problem."""
    return Problem(error.file, error.tensor, error.what)


def read_top(storage: Storage) -> tuple[Recording, Gaps, list[Problem]]:
    """Read recorded steps, gaps and problems from record.json and gaps.json."""
    recording, gaps, problems = Recording(), Gaps(), []
    try:
        recording = parse_header(read_checksummed(storage, RECORD_FILE)).recording
    except DamagedRecord as error:
        problems.append(damage(error))
    try:
        gaps = read_gaps(storage)
    except DamagedRecord as error:
        problems.append(damage(error))
    return recording, gaps, problems


def unexplained(steps: list[int], recording: Recording, gaps: Gaps) -> list[int]:
    """Steps that should have been recorded between the first and the last, and are in no gap."""
    absent = sorted(set(range(steps[0], steps[-1])) - set(steps)) if steps else []
    return [step for step in absent if recording.wants(step) and gaps.reason(step) is None]


def step_file(step: int) -> str:
    """The file that commits a step."""
    return f"{STEPS_FOLDER}/{step_name(step)}/{STEP_FILE}"


def layout_problems(storage: Storage) -> Iterator[Problem]:
    """Yield entries that are not part of a record, at the top and among the steps and anchors."""
    known = {RECORD_FILE, GAPS_FILE, STEPS_FOLDER, ANCHORS_FOLDER, *UNFINISHED_FILES}
    yield from (unexpected(name) for name in sorted(storage.names("")) if name not in known)
    for folder in (STEPS_FOLDER, ANCHORS_FOLDER):
        names = sorted(storage.names(folder))
        yield from (unexpected(f"{folder}/{name}") for name in names if not STEP_NAME.fullmatch(name))


def unfinished(step: int) -> Problem:
    """A step that was being written when the run ended."""
    return Problem(step_file(step), None, "is missing: the step was not finished", kind="unfinished")


def unexpected(file: str) -> Problem:
    """A file or folder that the record does not list."""
    return Problem(file, None, "is not part of the record", kind="foreign")


def step_problems(storage: Storage, step: int) -> Iterator[Problem]:
    """Yield the problems of a committed step; without step.json no others can be found."""
    folder = f"{STEPS_FOLDER}/{step_name(step)}"
    try:
        manifest = read_manifest(storage, step)
    except DamagedRecord as error:
        yield damage(error)
        return
    for name, batch in manifest.batches.items():
        yield from batch_problems(storage, f"{folder}/{name}", batch)
    for name, entry in manifest.files.items():
        yield from file_problems(storage, f"{folder}/{name}", entry)
    known = {STEP_FILE, *manifest.batches, *manifest.files}
    yield from (unexpected(f"{folder}/{n}") for n in sorted(storage.names(folder)) if n not in known)


def batch_problems(storage: Storage, file: str, entry: BatchEntry) -> Iterator[Problem]:
    """Yield each damaged tensor of a batch file, and its header."""
    try:
        check_header(storage, file, entry)
    except DamagedRecord as error:
        yield damage(error)
        if storage.size(file) is None:
            return
    for name, tensor in entry.tensors.items():
        try:
            checked_bytes(storage, file, name, tensor)
        except DamagedRecord as error:
            yield Problem(error.file, name, error.what)


def file_problems(storage: Storage, file: str, entry: FileEntry) -> Iterator[Problem]:
    """Yield the problem of a file that has one checksum for all of its bytes."""
    size_bytes = storage.size(file)
    if size_bytes is None:
        yield Problem(file, None, "is missing")
    elif size_bytes != entry.size_bytes:
        what = f"has {size_bytes} bytes, {entry.size_bytes} expected: it is cut off or changed"
        yield Problem(file, None, what)
    else:
        try:
            crc = 0
            for block in file_blocks(storage, file):
                crc = crc32c(block, crc)
            if f"{crc:08x}" != entry.crc32c:
                yield Problem(file, None, f"bytes do not match their crc32c {entry.crc32c}")
        except DamagedRecord as error:
            yield damage(error)


def anchor_problems(storage: Storage, folder: str) -> Iterator[Problem]:
    """Yield the problems of a finished anchor; an unfinished one is not part of the record yet."""
    file = f"{folder}/{ANCHOR_FILE}"
    try:
        manifest = parse_anchor(read_checksummed(storage, file), file)
    except DamagedRecord as error:
        yield damage(error)
        return
    for name, entry in manifest.files.items():
        yield from file_problems(storage, f"{folder}/{name}", entry)
    foreign = set(walk(storage, folder)) - {ANCHOR_FILE, *manifest.files}
    yield from (unexpected(f"{folder}/{name}") for name in sorted(foreign))
