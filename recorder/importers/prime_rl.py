"""prime-rl: what its trainer and orchestrator exchange on disk, and its token exports.

    rollouts/step_N/train_rollouts.bin   samples of the orchestrator (before 0.9; first rollouts.bin)
    rollouts/step_N/rank_R.bin           micro-batches of a rank of the trainer
    token_exports/step_N/rank_R.jsonl    sequences with the trainer's log-probs; STABLE ends a step

The .bin files are MessagePack of lists by position (`prime_rl_layouts.py`). In a micro-batch,
sequences follow each other; the tokens of the padding have no environment name, and fully masked
copies fill ranks that have fewer micro-batches.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from recorder.errors import ForeignFormat, UnfinishedFile
from recorder.importers.foreign import (
    BY_MASK,
    NO_VERSIONS_OR_REASONS,
    NO_WEIGHTS,
    Foreign,
    experts_of,
    member,
    number_or_none,
    optional,
    sequence_sample,
)
from recorder.importers.msgpack import unpack
from recorder.importers.prime_rl_layouts import MICRO_BATCHES, SAMPLES, named
from recorder.importers.sources import (
    Source,
    cut_off,
    first_row,
    incomplete,
    is_cut_line,
    json_lines,
    of_one_run,
    read_steps,
    with_cut_off,
)
from recorder.pictures.imported import counted, pictures_in
from recorder.pictures.packed import by_sequence, image_inputs
from recorder.trainers.sample import LEARNING, Sample

BATCH = r"(train_)?rollouts\.bin"
MICRO_BATCH = r"rank_\d+\.bin"
EXPORT = r"rank_\d+\.jsonl"
STEP = r"step_\d+"
STABLE = "STABLE"
PADDING = 1  # id of padding tokens
EXPORT_VERSION = 1
NOTES = ("groups are not in the file", NO_VERSIONS_OR_REASONS, NO_WEIGHTS)
PACKED = "micro-batches and ranks are not kept: all samples of a step become one batch"
NEEDED = ("input_ids", "loss_mask", "inference_logprobs", "advantages")
# values per token -> their names in learning
COLUMNS = {
    "advantages": "advantages",
    "ref_logprobs": LEARNING["ref_logprobs"],
    "teacher_logprobs": LEARNING["teacher_logprobs"],
    "trainer_logprobs": LEARNING["old_logprobs"],
    "entropy": LEARNING["entropies"],
}


def find(source: Source) -> list[Path]:
    """Return the files of the kind that has most: batches, micro-batches, or else exports."""
    batches = source.named(BATCH, STEP)
    if len({file.parent.parent for file in batches}) == 1:  # a trainer merges several runs
        return batches
    return source.named(MICRO_BATCH, STEP) or find_exports(source)


def find_exports(source: Source) -> list[Path]:
    files = source.named(EXPORT, STEP)
    found = [file for file in files if "export_sequence_idx" in first_row(file)]
    return with_cut_off(found, files, is_cut_line, levels=2)


def read(source: Source, files: Sequence[Path]) -> Foreign:
    """Read one step per folder. Raises ForeignFormat."""
    steps = {
        folder: list(paths) for folder, paths in groupby(of_one_run(files, 2), key=lambda file: file.parent)
    }
    marked = {file.parent for file in source.files if file.name == STABLE}
    is_export = files[0].suffix == ".jsonl"
    left_out = unmarked(steps, marked) if is_export and marked else incomplete(steps)
    notes: list[str] = []
    found, unfinished = read_steps(
        [(folder.name, paths) for folder, paths in steps.items() if folder not in left_out],
        lambda paths: read_step(paths, notes),
    )
    if left_out and not any(step.samples for step in found):
        raise UnfinishedFile(next(iter(left_out.values())))
    for folder in left_out:
        unfinished += cut_off(steps[folder], lambda paths: read_step(paths, []))
    unfinished += source.unfinished(f"{BATCH}|{MICRO_BATCH}")
    notes = list(dict.fromkeys([*NOTES, *counted(notes), *left_out.values(), *unfinished]))
    return Foreign("prime-rl", found, notes)


def unmarked(steps: Iterable[Path], marked: Collection[Path]) -> dict[Path, str]:
    return {
        folder: f"{folder} has no file {STABLE}: it was not written to its end, and is left out"
        for folder in steps
        if folder not in marked
    }


def read_step(files: Sequence[Path], notes: list[str]) -> list[Sample]:
    """Read the samples of a step; add to the notes what they lack."""
    if files[0].suffix == ".jsonl":
        notes.append(BY_MASK)
        return [parse_export(line.row, line.where) for file in files for line in json_lines(file)]
    documents = {file: unpack_file(file) for file in files}
    if re.fullmatch(BATCH, files[0].name):
        return [
            parse_sample(named(row, SAMPLES, f"{file}, sample {number}"), f"{file}, sample {number}", notes)
            for file, document in documents.items()
            for number, row in enumerate(batch_of(document, file))
        ]
    notes += [BY_MASK, PACKED]
    packed = [
        MicroBatch(
            f"{file}, micro-batch {number}", named(row, MICRO_BATCHES, f"{file}, micro-batch {number}")
        )
        for file, document in documents.items()
        for number, row in enumerate(document)
    ]
    trained = [batch.columns["input_ids"] for batch in packed if any(batch.columns["loss_mask"])]
    return [
        sample
        for batch in packed
        if any(batch.columns["loss_mask"]) or batch.columns["input_ids"] not in trained
        for sample in split(batch, notes)
    ]


def unpack_file(file: Path) -> list[Any]:
    """Parse a file. Raises ForeignFormat, UnfinishedFile."""
    document = unpack(file.read_bytes(), str(file))
    if not isinstance(document, list):
        raise ForeignFormat(f"{file} has no list")
    return document


def batch_of(document: list[Any], file: Path) -> list[Any]:
    """Return the samples of a batch: the first of its positions."""
    if not document or not isinstance(document[0], list):
        raise ForeignFormat(f"{file} has no samples")
    return document[0]


def parse_sample(members: Mapping[str, Any], where: str, notes: list[str]) -> Sample:
    """Parse a sample of the orchestrator, with or without a split of prompt and completion."""
    known: dict[str, Any] = {"reward": number_or_none(optional(members, "reward")), "where": where}
    known |= pictures_in(image_inputs(members), None, notes)
    if "token_ids" in members:
        notes.append(BY_MASK)
        tokens, mask, logprobs = (members[name] for name in ("token_ids", "mask", "logprobs"))
    else:
        prompt, completion = members["prompt_ids"], members["completion_ids"]
        tokens = prompt + completion
        mask = members["prompt_mask"] + members["completion_mask"]
        logprobs = [0.0] * len(prompt) + members["completion_logprobs"]
        known["prompt_length"] = len(prompt)
    experts = optional(members, "routed_experts")
    advantage = optional(members, "advantage")
    columns = {name: optional(members, name) for name in COLUMNS}
    if advantage is not None:
        columns["advantages"] = [advantage] * len(tokens)
    return sequence_sample(
        tokens,
        mask,
        logprobs=logprobs,
        learning={COLUMNS[name]: values for name, values in columns.items()},
        extras={} if experts is None else experts_of(expert_array(experts), len(tokens), where),
        **known,
    )


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch: its place for messages, and its members by name."""

    where: str
    columns: Mapping[str, Any]


def split(batch: MicroBatch, notes: list[str]) -> Iterator[Sample]:
    """Yield the sequences of a micro-batch, without padding."""
    arrays = {
        name: np.asarray(values) if name != "routed_experts" else expert_array(values)
        for name in (*NEEDED, "rewards", "env_names", "routed_experts", *COLUMNS)
        if (values := optional(batch.columns, name)) is not None
    }
    size, bounds = len(arrays["input_ids"]), bounds_of(batch)
    wrong = {name for name, values in arrays.items() if len(values) != size}
    if wrong & {*NEEDED} or [bounds[0], bounds[-1]] != [0, size] or bounds != sorted(bounds):
        raise ForeignFormat(f"{batch.where}: its columns and sequence lengths do not agree on {size} tokens")
    real = real_tokens(arrays, bounds)
    for name in sorted(wrong):
        if len(arrays[name]) == np.count_nonzero(real) and real[: len(arrays[name])].all():
            missing = np.zeros((size - len(arrays[name]), *arrays[name].shape[1:]), arrays[name].dtype)
            arrays[name] = np.concatenate([arrays[name], missing])  # of the padding
        else:
            notes.append(f"{batch.where}: {name} are of some of its sequences, not named, and left out")
            del arrays[name]
    pictures = by_sequence(image_inputs(batch.columns), optional(batch.columns, "mm_token_type_ids"), bounds)
    for number, (begin, end) in enumerate(pairwise(bounds)):
        kept = np.flatnonzero(real[begin:end]) + begin
        if len(kept):
            columns = {name: values[kept] for name, values in arrays.items()}
            sample = make_sample(columns, f"{batch.where}, sequence {number}")
            yield replace(sample, **pictures_in(pictures[number], None, notes))


def bounds_of(batch: MicroBatch) -> list[int]:
    """Return the bounds of the sequences; older versions have only positions that start again."""
    lengths = optional(batch.columns, "sequence_lengths")
    if lengths is None:
        positions = np.asarray(batch.columns["position_ids"])
        return [*np.flatnonzero(positions == 0).tolist(), len(positions)]
    return [0, *np.cumsum(lengths).tolist()]


def real_tokens(arrays: Mapping[str, np.ndarray], bounds: Sequence[int]) -> np.ndarray:
    """Return [tokens] which are not padding.

    Padding has no environment; in older versions it is a sequence of its own at the end.
    """
    ids = arrays["input_ids"]
    if len(arrays.get("env_names", ())) == len(ids):
        return arrays["env_names"] != ""
    last = slice(bounds[-2], bounds[-1]) if len(bounds) > 1 else slice(0)
    is_padding = (ids[last] == PADDING).all() and not arrays["loss_mask"][last].any()
    return np.arange(len(ids)) < (bounds[-2] if is_padding and len(bounds) > 1 else len(ids))


def make_sample(columns: Mapping[str, np.ndarray], where: str) -> Sample:
    rewards = columns.get("rewards", np.zeros(0))
    experts = columns.get("routed_experts")
    return sequence_sample(
        columns["input_ids"],
        columns["loss_mask"],
        logprobs=columns["inference_logprobs"],
        learning={name: columns.get(key) for key, name in COLUMNS.items()},
        reward=number_or_none(rewards[0]) if len(rewards) else None,
        extras={} if experts is None else experts_of(experts, len(columns["input_ids"]), where),
        where=where,
    )


def expert_array(experts: Any) -> np.ndarray:
    """Return [tokens, layers, k] of nested lists, or of (bytes, shape, dtype)."""
    if isinstance(experts, list) and len(experts) == 3 and isinstance(experts[0], bytes):
        data, shape, dtype = experts
        return np.frombuffer(data, np.dtype(str(dtype))).reshape([int(size) for size in shape])
    return np.asarray(experts)


def parse_export(row: Mapping[str, Any], where: str) -> Sample:
    version = member(row, "schema_version", where)
    if version != EXPORT_VERSION:
        raise ForeignFormat(f"{where} has schema_version {version}, {EXPORT_VERSION} expected")
    names = ("token_ids", "loss_mask", "inference_logprobs")
    columns = {
        "input_ids" if name == "token_ids" else name: np.asarray(member(row, name, where)) for name in names
    }
    others = {name: optional(row, name) for name in ("rewards", *COLUMNS)}
    columns |= {name: np.asarray(values, np.float64) for name, values in others.items() if values is not None}
    return make_sample(columns, where)
