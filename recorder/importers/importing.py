"""Import a foreign dump as a record of one rank in the scope `rollout`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from areal_core.safety.confine import bounds_for, run_confined
from areal_core.safety.printable import printable
from areal_core.safety.scratch import unfinished_folder
from recorder.checksum_json import json_text
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
from recorder.importers.foreign import Foreign, ImportedSample, Step, count_without
from recorder.integrity.chain import write_end
from recorder.step_files import RankStep, commit_step, write_rank
from recorder.tensors import flatten


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
            batch, text = batch_of(step, number, first_prompt)
            first_prompt = int(batch["prompt_id"].max(initial=first_prompt - 1)) + 1
            link = write_step(folder, number, batch, text, link)
        write_end(folder, True, link)
        samples = [sample for step in foreign.steps for sample in step.samples]
        num_tokens = sum(len(sample.tokens) for sample in samples)
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
    """Describe what single samples lack, and the value recorded instead."""
    samples = [sample for step in foreign.steps for sample in step.samples]
    places = {
        "logprobs": "0 is recorded: replay with actor.recompute_logprob=true",
        "reward": "0 is recorded",
        "versions": "every token counts as sampled by the weights of its step",
    }
    counts = {name: count_without(samples, name) for name in places}
    return [
        f"{count} of {len(samples)} samples have no {name}: {places[name]}"
        for name, count in counts.items()
        if count
    ]


def header_of(
    foreign: Foreign, source: Path, notes: Sequence[str], config: Mapping[str, Any], model: dict[str, Any]
) -> RecordHeader:
    """Build record.json of an import: one rank, scope `rollout`, unknown environment."""
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
        recording=Recording(scope="rollout"),
    )


def batch_of(step: Step, number: int, first_prompt: int) -> tuple[dict[str, np.ndarray], bytes | None]:
    """Return the padded batch of a step, whose prompts count from `first_prompt`, and its text."""
    rows, prompt_ids, sample_ids = canonical(step.samples)
    return pad(rows, [first_prompt + prompt for prompt in prompt_ids], sample_ids, number), text_lines(rows)


def write_step(
    destination: Path,
    number: int,
    batch: dict[str, np.ndarray],
    text: bytes | None,
    previous: StepLink | None,
) -> StepLink:
    """Write one committed step, and return the link for the next one."""
    folder = destination / STEPS_FOLDER / step_name(number)
    folder.mkdir(parents=True)
    written = write_rank(folder, 0, 1, RankStep(number, number, flatten(batch), text=text))
    return commit_step(folder, number, number + 1, [written], previous).link


def canonical(samples: Sequence[ImportedSample]) -> tuple[list[ImportedSample], list[int], list[int]]:
    """Sort samples by group, in order of appearance; return them, `prompt_id`s and `sample_id`s."""
    groups: dict[Any, list[ImportedSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    rows = [sample for group in groups.values() for sample in group]
    prompt_ids = [number for number, group in enumerate(groups.values()) for _ in group]
    sample_ids = [number for group in groups.values() for number in range(len(group))]
    return rows, prompt_ids, sample_ids


def pad(
    rows: Sequence[ImportedSample], prompt_ids: list[int], sample_ids: list[int], version: int
) -> dict[str, np.ndarray]:
    """Build the padded batch of ARCHITECTURE.md."""
    shape = (len(rows), max(len(row.tokens) for row in rows))
    batch: dict[str, np.ndarray] = {
        "attention_mask": np.zeros(shape, bool),
        "input_ids": np.zeros(shape, np.int32),
        "loss_mask": np.zeros(shape, np.int32),
        "logprobs": np.zeros(shape, np.float32),
        "versions": np.zeros(shape, np.int32),
        "rewards": np.array([row.reward or 0.0 for row in rows], np.float32),
        "prompt_id": np.array(prompt_ids, np.int64),
        "sample_id": np.array(sample_ids, np.int32),
        "finish_reason": np.array([row.finish_reason for row in rows], np.int32),
    }
    for number, row in enumerate(rows):
        size = len(row.tokens)
        batch["attention_mask"][number, :size] = True
        batch["input_ids"][number, :size] = row.tokens
        batch["loss_mask"][number, :size] = row.loss_mask
        if row.logprobs is not None:
            batch["logprobs"][number, :size] = row.logprobs
        versions = np.where(row.loss_mask != 0, version, -1) if row.versions is None else row.versions
        batch["versions"][number, :size] = versions
    return batch


def text_lines(rows: Sequence[ImportedSample]) -> bytes | None:
    """Return the text file of a step, None if the format has no text."""
    if not any(row.text for row in rows):
        return None
    lines = []
    for number, row in enumerate(rows):
        prompt, completion = row.text or ("", "")
        line = {"row": number, "prompt": prompt, "completion": completion, "reward": row.reward or 0.0}
        lines.append(json_text(line) + "\n")
    return "".join(lines).encode()
