"""Import a foreign dump as a record of one rank in the scope `given`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from areal_core.safety.confine import bounds_for, run_confined
from areal_core.safety.printable import printable
from areal_core.safety.scratch import unfinished_folder
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
from recorder.importers import (
    areal,
    nemo_rl,
    open_instruct,
    prime_rl,
    roll,
    skyrl,
    slime,
    text,
    verl,
    xtuner,
)
from recorder.importers.foreign import Foreign, count_without
from recorder.integrity.chain import write_end
from recorder.step_files import RankStep, commit_step, write_rank
from recorder.trainers.batches import Content, content_of, number_groups


@dataclass(frozen=True)
class Format:
    """Functions that recognise and read a format."""

    recognises: Callable[[Path], bool]
    read: Callable[[Path], Foreign]


# Formats recognised by a file's name come before those recognised by its content.
FORMATS = {
    "verl": Format(verl.recognises, verl.read),
    "prime-rl": Format(prime_rl.recognises, prime_rl.read),
    "nemo-rl": Format(nemo_rl.recognises, nemo_rl.read),
    "skyrl": Format(skyrl.recognises, skyrl.read),
    "roll": Format(roll.recognises, roll.read),
    "xtuner": Format(xtuner.recognises, xtuner.read),
    "open-instruct": Format(open_instruct.recognises, open_instruct.read),
    "slime": Format(slime.recognises, slime.read),
    "areal": Format(areal.recognises, areal.read),
    "areal-text": Format(text.recognises_areal, text.read_areal),
    "verl-text": Format(text.recognises_verl, text.read_verl),
}


@dataclass(frozen=True)
class Imported:
    """Result of an import. `notes` list what the format cannot represent and what was assumed."""

    format: str
    steps: tuple[str, ...]
    num_samples: int
    num_tokens: int
    notes: tuple[str, ...]


def read_foreign(source: Path, format_name: str | None = None) -> Foreign:
    """Read the steps of a source. Raises ForeignFormat, UnsafePickle."""
    name = find_format(source) if format_name is None else format_name
    if name not in FORMATS:
        raise ForeignFormat(
            f"{name!r} is not a known format: {', '.join(FORMATS)}, or miles, which is slime's"
        )
    foreign = FORMATS[name].read(source)
    if not any(step.samples for step in foreign.steps):
        raise ForeignFormat(f"{source} has no samples of {name}")
    return foreign


def find_format(source: Path) -> str:
    """Return the format that recognises the source.

    Raises ForeignFormat if none does, UnsafePickle.
    """
    for name, known in FORMATS.items():
        if known.recognises(source):
            return name
    raise ForeignFormat(f"{source} has no known format: choose one with --from {'|'.join(FORMATS)}")


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
    try:
        foreign = read_foreign(source, format_name)
        notes = [*foreign.notes, *missing_notes(foreign)]
        clear_record(folder)
        write_header(folder, header_of(foreign, source, notes, config, model))
        link, first_prompt = None, 0
        for number, step in enumerate(foreign.steps):
            (places,), first_prompt = number_groups([[s.group for s in step.samples]], first_prompt)
            link = write_step(folder, number, content_of(step.samples, places), link)
        write_end(folder, True, link)
        samples = [sample for step in foreign.steps for sample in step.samples]
        num_tokens = sum(sample.num_tokens for sample in samples)
    except (RecordError, MemoryError, OSError):
        raise
    except Exception as error:  # what others wrote may have any type and shape anywhere
        what = f"{type(error).__name__}: {printable(str(error), 300)}"
        raise ForeignFormat(
            f"{source} is not what {format_name or 'a known framework'} writes ({what})"
        ) from None
    steps = tuple(step.name for step in foreign.steps)
    return Imported(foreign.format, steps, len(samples), num_tokens, tuple(notes))


def missing_notes(foreign: Foreign) -> list[str]:
    """Describe what samples lack: it is recorded as unknown."""
    samples = [sample for step in foreign.steps for sample in step.samples]
    counts = {name: count_without(samples, name) for name in ("logprobs", "reward", "versions")}
    return [
        f"{count} of {len(samples)} samples have no {name}: recorded as unknown"
        for name, count in counts.items()
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
    """Write one committed step, and return the link for the next one."""
    folder = destination / STEPS_FOLDER / step_name(number)
    folder.mkdir(parents=True)
    step = RankStep(number, number + 1, content.batch, learning=content.learning, text=content.text)
    return commit_step(folder, number, number + 1, [write_rank(folder, 0, 1, step)], previous).link
