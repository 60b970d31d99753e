"""Read every byte of a record; report each damaged file and tensor, and files that contradict."""

import hashlib
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from recorder.errors import DamagedRecord, UnknownFormat
from recorder.format import (
    ANCHOR_FILE,
    ANCHORS_FOLDER,
    END_FILE,
    IMAGES_FOLDER,
    RECORD_FILE,
    STEP_FILE,
    STEPS_FOLDER,
    TOP_FILES,
    UNFINISHED_FILES,
    BatchEntry,
    EndMark,
    FileEntry,
    RecordHeader,
    Recording,
    StepManifest,
    is_lock_file,
    parse_anchor,
    parse_header,
    step_name,
    step_number,
)
from recorder.header import Gaps
from recorder.integrity.chain import Chain, Linked, missing_steps
from recorder.integrity.contents import Prompts, contradictions, prompts_of
from recorder.lock import writer_of
from recorder.pictures.named import PICTURE_NAME, picture_file, read_picture
from recorder.pictures.shared import is_leftover
from recorder.reader import (
    Damage,
    Record,
    RecordedStep,
    check_file,
    not_a_record,
    numbered_folders,
    open_storage,
    parse_manifest,
    read_checksummed,
    read_end,
    read_gaps,
    read_small,
    step_file,
    step_folders,
)
from recorder.storage import KeptFiles, Storage, file_blocks, walk
from recorder.tensors import check_header, checked_bytes


@dataclass(frozen=True)
class Problem:
    """A file or tensor that differs from what was written; `tensor` is None for a complete file.

    `kind` is "damaged" (bytes are missing or differ), "foreign" (not part of the record) or
    "unfinished" (a last step that was being written when the run ended; committed steps are not
    affected), or "contradiction" (bytes are as sealed, and files do not agree).
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
    """`steps_missing` are unfinished, or absent for no known reason, at most 1,000 of these.

    `end` is None without an end mark: last steps may be missing then. `written_by` is the live
    process that writes the record, as a phrase, if there is one.
    """

    problems: tuple[Problem, ...]
    steps_ok: tuple[int, ...]
    steps_missing: tuple[int, ...]
    end: EndMark | None = None
    written_by: str | None = None

    @property
    def intact(self) -> bool:
        """True if no problem was found."""
        return not self.problems


@dataclass(frozen=True)
class StepFacts:
    """What a committed step says by itself.

    `problems` are those of its bytes, `contradictions` those between its files. `linked` is None if
    step.json cannot be read. `prompts` are the ids of its prompts, `pictures` the names of its
    pictures; both are empty if they are not known. `recorded` has the files that were read.
    """

    problems: tuple[Problem, ...] = ()
    linked: Linked | None = None
    contradictions: tuple[Problem, ...] = ()
    prompts: tuple[int, ...] = ()
    pictures: tuple[str, ...] = ()
    recorded: RecordedStep | None = None


def verify(
    path: str | os.PathLike[str],
    on_step: Callable[[int], None] = lambda step: None,
) -> VerifyReport:
    """Check a complete record: every byte, then what its files say about each other.

    Damage is reported and never raised; calls `on_step` after each step.

    Raises RecordNotFound and NotARecord, and UnknownFormat for a version that cannot be checked.
    """
    storage = open_storage(path)
    if not {RECORD_FILE, STEPS_FOLDER}.intersection(storage.names("")):
        raise not_a_record(path, storage)
    header, gaps, end, problems = read_top(storage)
    steps, anchors = [], []
    try:
        problems += layout_problems(storage)
        steps = step_folders(storage, gaps)
        anchors = numbered_folders(storage, ANCHORS_FOLDER)
    except DamagedRecord as error:
        problems.append(damage(error))
    last_committed = next((s for s in reversed(steps) if has_step_file(storage, s)), -1)
    checks = StepChecks(storage, header)
    chain, prompts, pictures = Chain(gaps), Prompts(), set[str]()
    of_steps: list[Problem] = []
    steps_ok: list[int] = []
    unfinished_steps: list[int] = []
    for step in steps:
        if step > last_committed:
            what = "is missing: the step was not finished"
            facts = StepFacts((Problem(step_file(step), None, what, kind="unfinished"),))
        else:
            facts = checks.facts(step)
        found = [*facts.problems]
        if facts.linked is None:
            chain.skip()
        else:
            found += [contradiction(step_file(step), what) for what in chain.follow(facts.linked)]
        found += facts.contradictions
        prompts.add(step, facts.prompts)
        pictures.update(facts.pictures)
        of_steps += found
        if not found:
            steps_ok.append(step)
        elif not has_step_file(storage, step):
            unfinished_steps.append(step)
        on_step(step)
    repeated = dict(prompts.repeated())
    of_steps += [contradiction(step_file(step), what) for step, what in repeated.items()]
    if end is not None:
        problems += [contradiction(END_FILE, what) for what in chain.check_end(end)]
    recording = Recording() if header is None else header.recording
    missing = missing_steps(steps, chain.absent, recording, gaps)
    problems += [Problem(f"{STEPS_FOLDER}/{step_name(step)}", None, "is missing") for step in missing]
    problems += of_steps
    if len(steps_ok) + len(unfinished_steps) == len(steps):  # else nobody knows which pictures are named
        problems += orphan_problems(storage, pictures)
    for step in anchors:
        problems += anchor_problems(storage, f"{ANCHORS_FOLDER}/{step_name(step)}")
    return VerifyReport(
        tuple(dict.fromkeys(problems)),  # a picture may be of several steps
        tuple(step for step in steps_ok if step not in repeated),
        tuple(sorted([*missing, *unfinished_steps])),
        end,
        writer_of(path),
    )


def check_step(record: Record, step: int) -> RecordedStep:
    """Return a step after reading every byte of it and of its pictures.

    Raises DamagedRecord, which names the record as well: two may be compared.
    """
    facts = StepChecks(record.storage, None).facts(step) if step in record.steps else StepFacts()
    for problem in facts.problems:
        if problem.kind == "damaged":
            raise DamagedRecord(f"{record.path}/{problem.file}", problem.what, problem.tensor)
    return facts.recorded or record.step(step)


def intact_steps(
    record: Record, steps: Sequence[int], skip_damaged: bool, left_out: dict[str, int]
) -> Iterator[RecordedStep]:
    """Yield the steps that are intact, after reading every byte of them.

    What is wrong with others goes into `left_out`, a sentence and the step. Raises DamagedRecord
    for the first that is not intact unless `skip_damaged`.
    """
    checks = StepChecks(record.storage, None)
    for step in steps:
        facts = checks.facts(step)
        found = [problem for problem in facts.problems if problem.kind == "damaged"]
        if found and not skip_damaged:
            raise refused(found[0])
        left_out |= {f"step {step} is left out: {problem}": step for problem in found}
        if not found:
            yield facts.recorded or record.step(step)


def steps_to_copy(
    record: Record, steps: Sequence[int], skip_damaged: bool
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the numbers of the steps that `intact_steps` yields, and what is wrong with others."""
    left_out: dict[str, int] = {}
    intact = tuple(step.manifest.step for step in intact_steps(record, steps, skip_damaged, left_out))
    return intact, tuple(left_out)


def refused(problem: Problem) -> DamagedRecord:
    """Return the error of a copy that would contain damage."""
    return DamagedRecord(
        problem.file,
        f"{problem.what}: nothing was written, --skip-damaged leaves out what is damaged",
        problem.tensor,
    )


def damage(error: DamagedRecord) -> Problem:
    return Problem(error.file, error.tensor, error.what)


def contradiction(file: str, what: str) -> Problem:
    """A file whose bytes are as sealed, and which contradicts another."""
    return Problem(file, None, what, kind="contradiction")


def read_top(storage: Storage) -> tuple[RecordHeader | None, Gaps, EndMark | None, list[Problem]]:
    header, gaps, end, damaged = None, Gaps(), None, Damage()
    with damaged.left_out():
        header = parse_header(read_checksummed(storage, RECORD_FILE))
    with damaged.left_out():
        gaps = read_gaps(storage)
    with damaged.left_out():
        end = read_end(storage)
    return header, gaps, end, [damage(error) for error in damaged.found.values()]


def has_step_file(storage: Storage, step: int) -> bool:
    """Return whether the step is committed; what is there and no regular file counts, too."""
    try:
        return storage.size(step_file(step)) is not None
    except DamagedRecord:
        return True


def layout_problems(storage: Storage) -> Iterator[Problem]:
    """Yield entries that are not part of a record, at the top and among the steps and anchors."""
    known = {STEPS_FOLDER, ANCHORS_FOLDER, IMAGES_FOLDER, *TOP_FILES, *UNFINISHED_FILES}
    names = sorted(name for name in storage.names("") if not is_lock_file(name))
    yield from (unexpected(name) for name in names if name not in known)
    for folder in (STEPS_FOLDER, ANCHORS_FOLDER):
        names = sorted(storage.names(folder))
        yield from (unexpected(f"{folder}/{name}") for name in names if step_number(name) is None)
    for name in sorted(storage.names(IMAGES_FOLDER)):
        if not PICTURE_NAME.fullmatch(name) and not is_leftover(name):
            yield unexpected(picture_file(name))


def orphan_problems(storage: Storage, named: Container[str]) -> Iterator[Problem]:
    """Yield pictures that no step has; `named` are those that a step has."""
    for name in sorted(storage.names(IMAGES_FOLDER)):
        if PICTURE_NAME.fullmatch(name) and name not in named:
            what = "is of no step: a run that was interrupted, or still records, has left it"
            yield Problem(picture_file(name), None, what, kind="unfinished")


def unexpected(file: str) -> Problem:
    return Problem(file, None, "is not part of the record", kind="foreign")


@dataclass(frozen=True)
class StepChecks:
    """The checks of committed steps, each by itself; `header` is None if it is damaged.

    `pictures` has the problem of each picture that was checked, or None.
    """

    storage: Storage
    header: RecordHeader | None
    pictures: dict[str, Problem | None] = field(default_factory=dict)

    def facts(self, step: int) -> StepFacts:
        """Check a step; without step.json nothing else can be found."""
        folder, file, storage = f"{STEPS_FOLDER}/{step_name(step)}", step_file(step), KeptFiles(self.storage)
        try:
            data = read_small(storage, file)
            manifest = parse_manifest(data, step)
        except DamagedRecord as error:
            return StepFacts((damage(error),))
        except UnknownFormat as error:
            return StepFacts((Problem(file, None, str(error)),))
        recorded = RecordedStep(storage, manifest)
        found, pictures = [*problems_of_bytes(storage, folder, manifest)], dict[str, int]()
        if not found:
            try:
                pictures = recorded.named_pictures()
            except DamagedRecord as error:
                found.append(damage(error))
        found += self.problems_of_pictures(pictures)
        sha256 = hashlib.sha256(data).hexdigest()
        linked = Linked(step, manifest.version, manifest.format_version, manifest.previous, sha256)
        contradictions: list[Problem] = []
        prompts: list[int] = []
        if not found and self.header is not None:
            contradictions, prompts = self.contradictions(recorded, self.header)
        return StepFacts(
            tuple(found), linked, tuple(contradictions), tuple(prompts), tuple(pictures), recorded
        )

    def problems_of_pictures(self, named: Mapping[str, int]) -> Iterator[Problem]:
        """Yield the damaged pictures, by name with their sizes; each is read once."""
        for name, size_bytes in named.items():
            if name not in self.pictures:
                self.pictures[name] = picture_problem(self.storage, name, size_bytes)
            if (problem := self.pictures[name]) is not None:
                yield problem

    def contradictions(self, step: RecordedStep, header: RecordHeader) -> tuple[list[Problem], list[int]]:
        """Return what the files of a step say about each other and cannot both be true.

        With the ids of its prompts, which no other step may have.
        """
        found: list[Problem] = []
        prompts: list[int] = []
        try:
            found += [contradiction(file, what) for file, what in contradictions(step, header)]
            # imports number the prompts of each step from 0 in format 1
            if step.manifest.format_version > 1 or "imported" not in header.environment:
                prompts, twice = prompts_of(step)
                found += [contradiction(file, what) for file, what in twice]
        except DamagedRecord as error:
            found.append(damage(error))
        return found, prompts


def problems_of_bytes(storage: Storage, folder: str, manifest: StepManifest) -> Iterator[Problem]:
    yield from listed_problems(storage, folder, manifest)
    known = {STEP_FILE, *manifest.batches, *manifest.files}
    yield from (unexpected(f"{folder}/{n}") for n in sorted(storage.names(folder)) if n not in known)


def listed_problems(storage: Storage, folder: str, manifest: StepManifest) -> Iterator[Problem]:
    for name, batch in manifest.batches.items():
        yield from batch_problems(storage, f"{folder}/{name}", batch)
    for name, entry in manifest.files.items():
        yield from file_problems(storage, f"{folder}/{name}", entry)


def picture_problem(storage: Storage, name: str, size_bytes: int) -> Problem | None:
    try:
        read_picture(storage, name, size_bytes)
    except DamagedRecord as error:
        return damage(error)
    return None


def batch_problems(storage: Storage, file: str, entry: BatchEntry) -> Iterator[Problem]:
    try:
        check_header(storage, file, entry)
    except DamagedRecord as error:
        yield damage(error)
        if error.tensor is None:  # absent, or of another size
            return
    for name, tensor in entry.tensors.items():
        try:
            checked_bytes(storage, file, name, tensor)
        except DamagedRecord as error:
            yield Problem(error.file, name, error.what)


def file_problems(storage: Storage, file: str, entry: FileEntry) -> Iterator[Problem]:
    try:
        check_file(storage, file, entry, file_blocks(storage, file))
    except DamagedRecord as error:
        yield damage(error)


def anchor_problems(storage: Storage, folder: str) -> Iterator[Problem]:
    """Yield the problems of a finished anchor; an unfinished one is not part of the record yet."""
    file = f"{folder}/{ANCHOR_FILE}"
    try:
        if storage.size(file) is None:
            return
        manifest = parse_anchor(read_checksummed(storage, file), file)
        if step_name(manifest.step) != folder.split("/")[1]:
            yield Problem(file, None, f"belongs to step {manifest.step}: a folder was renamed")
        foreign = set(walk(storage, folder)) - {ANCHOR_FILE, *manifest.files}
    except DamagedRecord as error:
        yield damage(error)
        return
    for name, entry in manifest.files.items():
        yield from file_problems(storage, f"{folder}/{name}", entry)
    yield from (unexpected(f"{folder}/{name}") for name in sorted(foreign))
