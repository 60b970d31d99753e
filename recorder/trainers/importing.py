"""Import a foreign dump as a record of one rank in the scope `given`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from areal_core.safety.printable import printable
from areal_core.safety.scratch import unfinished_folder
from recorder.confine import bounds_for, run_confined
from recorder.environment import folder_identity
from recorder.errors import ForeignFormat, RecordError, RecordNotFound, UnsafePickle
from recorder.format import (
    FORMAT_VERSION,
    STEPS_FOLDER,
    RecordHeader,
    Recording,
    StepLink,
    step_name,
)
from recorder.header import check_folder, clear_record, write_header
from recorder.integrity.chain import write_end
from recorder.step_files import RankStep, commit_step, write_rank
from recorder.trainers import (
    areal,
    areno,
    nemo_rl,
    open_instruct,
    prime_rl,
    roll,
    skyrl,
    slime,
    text,
    trl,
    verl,
    xtuner,
)
from recorder.trainers.batches import Content, check_kinds, content_of, number_groups
from recorder.trainers.foreign import (
    Foreign,
    ReadFile,
    Source,
    find_source,
    lines_of,
    read_at,
    read_files,
    with_members,
)


@dataclass(frozen=True)
class Format:
    """Functions that find the files of a format, and read them."""

    find: Callable[[Source], Sequence[Path]]
    read: Callable[[Source, Sequence[Path]], Foreign]


def named(pattern: str) -> Callable[[Source], Sequence[Path]]:
    """Find the files of a format by their names alone."""
    return lambda source: source.named(pattern)


def by_file(
    name: str, notes: Sequence[str], read: ReadFile, step: str = "{}"
) -> Callable[[Source, Sequence[Path]], Foreign]:
    return lambda source, files: read_files(name, notes, files, read, step)


# In the order in which they are tried: formats found by names before those found by content, and
# those with tokens before text.
FORMATS = {
    "verl": Format(verl.find, verl.read),
    "prime-rl": Format(prime_rl.find, prime_rl.read),
    "nemo-rl": Format(named(nemo_rl.TRAIN_FILE), nemo_rl.read),
    "skyrl": Format(named(skyrl.FILES), by_file("skyrl", skyrl.NOTES, skyrl.read_batch)),
    "roll": Format(named(roll.FILES), by_file("roll", roll.NOTES, roll.read_batch)),
    "xtuner": Format(named(xtuner.FILES), by_file("xtuner", xtuner.NOTES, xtuner.read_groups)),
    "open-instruct": Format(named(open_instruct.FILES), open_instruct.read),
    "areno": Format(areno.find, by_file("areno", areno.NOTES, lines_of(areno.parse_row))),
    "slime": Format(slime.find, slime.read),
    "areal": Format(areal.find, areal.read),
    "trl": Format(named(trl.FILES), by_file("trl", trl.NOTES, trl.read_table)),
    "areal-text": Format(
        lambda source: with_members(source.named(text.AREAL_FILES, text.AREAL_FOLDERS), text.AREAL, levels=2),
        text.read_areal,
    ),
    "verl-text": Format(
        lambda source: with_members(source.named(text.VERL_FILES), text.VERL),
        by_file("verl-text", text.NOTES, lines_of(text.verl_row), step="step {}"),
    ),
    "roll-text": Format(named(text.ROLL_FILES), by_file("roll-text", text.NOTES, text.read_roll)),
}
MISSING = ("reward", "group", "finish_reason")  # and of samples with tokens:
MISSING_PER_TOKEN = ("loss_mask", "logprobs", "versions")
OTHER_NAMES = {
    "miles": "slime",
    "nemo": "nemo-rl",
    "prime-rl-tokens": "prime-rl",
    "areal-jsonl": "areal-text",
    "verl-jsonl": "verl-text",
}


@dataclass(frozen=True)
class Imported:
    """Result of an import. `notes` list what the format cannot represent and what was assumed."""

    format: str
    steps: tuple[str, ...]
    num_samples: int
    num_tokens: int
    notes: tuple[str, ...]


def read_foreign(path: Path, format_name: str | None = None) -> Foreign:
    source, name = find_source(path.absolute()), format_name  # formats ask for names of folders above
    if name is not None:
        name = OTHER_NAMES.get(name.replace("_", "-"), name.replace("_", "-"))
        if name not in FORMATS:
            known = ", ".join([*FORMATS, *OTHER_NAMES])
            raise ForeignFormat(f"unknown format {printable(name, 60)!r}: choose one of {known}")
    for known, functions in FORMATS.items():
        if name not in (None, known):
            continue
        if files := functions.find(source) or (list(source.files) if name and path.is_file() else []):
            foreign = functions.read(source, files)
            break
    else:
        if name is None and (path / "record.json").is_file():
            raise ForeignFormat(f"{path} is a record already: areal-debug record show {path}")
        unknown = f"no known format: choose one with --from {'|'.join(FORMATS)}"
        raise ForeignFormat(f"{path} has " + (f"no files of {name}" if name else unknown))
    steps = [step for step in foreign.steps if step.samples]
    if not steps:
        raise ForeignFormat(f"{path} has no samples of {foreign.format}")
    empty = [f"{step.name} has no samples: it is left out" for step in foreign.steps if not step.samples]
    return replace(foreign, steps=steps, notes=[*foreign.notes, *empty])


def import_record(
    source: Path,
    destination: Path,
    format_name: str | None = None,
    config: Mapping[str, Any] | None = None,
    model: str | None = None,
    overwrite: bool = False,
) -> Imported:
    """Write a record from the dump of another framework, which a confined child process reads.

    Args:
        config: the resolved options for training on the steps; without them the record has none.
        model: the model that the first step starts from, whose files a replay then checks.

    Raises:
        RecordExists: the destination is not empty.
        RecordNotFound, ForeignFormat, UnsafePickle, LimitReached: the source cannot be read.
    """
    check_folder(destination, overwrite)
    if not source.exists():
        raise RecordNotFound(f"{source} does not exist: give a file or folder that another framework wrote")
    # outside of the child, which cannot read the model
    identity = {"path": "", "files": {}} if model is None else folder_identity(model)
    with unfinished_folder(destination) as content:
        facts = run_confined(
            lambda: asdict(write_import(source, content, format_name, config or {}, identity)),
            bounds_for([source], [content.parent]),
            errors=(ForeignFormat, UnsafePickle, RecordError),
        )
    return Imported(**facts | {"steps": tuple(facts["steps"]), "notes": tuple(facts["notes"])})


def write_import(
    source: Path,
    folder: Path,
    format_name: str | None,
    config: Mapping[str, Any],
    model: dict[str, Any],
) -> Imported:
    """Read the source and write the record. Raises RecordError, MemoryError, OSError."""
    with read_at(str(source)):
        foreign = read_foreign(source, format_name)
        notes = [*foreign.notes, *missing_notes(foreign)]
        clear_record(folder)
        write_header(folder, header_of(foreign, source, notes, config, model))
        link, first_prompt = None, 0
        for number, step in enumerate(foreign.steps):
            check_kinds(step.samples)
            (places,), first_prompt = number_groups([[s.group for s in step.samples]], first_prompt)
            link = write_step(folder, number, content_of(step.samples, places), link)
        write_end(folder, True, link)
        samples = [sample for step in foreign.steps for sample in step.samples]
        num_tokens = sum(sample.num_tokens for sample in samples)
    steps = tuple(step.name for step in foreign.steps)
    return Imported(foreign.format, steps, len(samples), num_tokens, tuple(notes))


def missing_notes(foreign: Foreign) -> list[str]:
    """Describe what samples lack: it is recorded as unknown."""
    samples = [sample for step in foreign.steps for sample in step.samples]
    with_tokens = [sample for sample in samples if sample.tokens is not None]
    counts = {
        name: (sum(getattr(sample, name) is None for sample in group), len(group))
        for names, group in ((MISSING, samples), (MISSING_PER_TOKEN, with_tokens))
        for name in names
    }
    return [
        f"{count} of {total} samples have no {name.replace('_', ' ')}: recorded as unknown"
        for name, (count, total) in counts.items()
        if count
    ]


def header_of(
    foreign: Foreign, source: Path, notes: Sequence[str], config: Mapping[str, Any], model: dict[str, Any]
) -> RecordHeader:
    """Build record.json of an import: one rank, scope `given`, unknown environment."""
    return RecordHeader(
        format_version=FORMAT_VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        world_size=1,
        num_ranks=1,
        allocation=None,
        model=model,
        tokenizer=None,
        environment={
            "torch": {"build": None},
            "code": {"commit": None, "dirty_sha256": None},
            "imported": {
                "format": foreign.format,
                "source": source.name,
                "steps": [step.name for step in foreign.steps],
                "notes": list(notes),
            },
        },
        config=dict(config),
        recording=Recording(scope="given"),
    )


def write_step(destination: Path, number: int, content: Content, previous: StepLink | None) -> StepLink:
    folder = destination / STEPS_FOLDER / step_name(number)
    folder.mkdir(parents=True)
    step = RankStep(number, number + 1, content.batch, learning=content.learning, text=content.text)
    return commit_step(folder, number, number + 1, [write_rank(folder, 0, 1, step)], previous).link
