"""prime-rl: what its trainer and orchestrator exchange on disk, and its token exports.

    rollouts/step_N/train_rollouts.bin   samples of the orchestrator (before 0.9; first rollouts.bin)
    rollouts/step_N/rank_R.bin           micro-batches of a rank of the trainer
    token_exports/step_N/rank_R.jsonl    sequences with the trainer's log-probs; STABLE ends a step

The .bin files are MessagePack of lists by position. In a micro-batch,
sequences follow each other; the tokens of the padding have no environment name, and fully masked
copies fill ranks that have fewer micro-batches.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from areal_core.safety.printable import printable
from areal_core.safety.received import MOST_BYTES, read_received
from recorder.errors import ForeignFormat, RecordError, UnfinishedFile
from recorder.trainers.file_pictures import by_sequence, image_inputs, pictures_in
from recorder.trainers.foreign import (
    BY_MASK,
    NO_VERSIONS_OR_REASONS,
    NO_WEIGHTS,
    Foreign,
    Source,
    counted,
    cut_off,
    experts_of,
    incomplete,
    json_lines,
    member,
    number_or_none,
    of_one_run,
    optional,
    read_steps,
    sequence_sample,
    with_members,
)
from recorder.trainers.guarded import Guarded
from recorder.trainers.sample import LEARNING, Sample

BATCH = r"(train_)?rollouts\.bin"
MICRO_BATCH = r"rank_\d+\.bin"
EXPORT = r"rank_\d+\.jsonl"
STEP = r"step_\d+"
STABLE = "STABLE"
PADDING = 1  # id of padding tokens
EXPORT_VERSION = 1
NOTES = ("groups are not in the file", NO_VERSIONS_OR_REASONS, NO_WEIGHTS)
ONE_BATCH = "micro-batches and ranks are not kept: all samples of a step become one batch"
NEEDED = ("input_ids", "loss_mask", "inference_logprobs", "advantages")
# values per token -> their names in learning
COLUMNS = {
    "advantages": "advantages",
    "ref_logprobs": LEARNING["ref_logprobs"],
    "teacher_logprobs": LEARNING["teacher_logprobs"],
    "trainer_logprobs": LEARNING["old_logprobs"],
    "entropy": LEARNING["entropies"],
    "loss_weights": "loss_weights",
}


def find(source: Source) -> list[Path]:
    """Return the files of the kind that has most: batches, micro-batches, or else exports."""
    batches = source.named(BATCH, STEP)
    if len({file.parent.parent for file in batches}) == 1:  # a trainer merges several runs
        return batches
    return source.named(MICRO_BATCH, STEP) or find_exports(source)


def find_exports(source: Source) -> list[Path]:
    return with_members(source.named(EXPORT, STEP), {"export_sequence_idx"}, levels=2)


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
        return [line.parsed(parse_export) for file in files for line in json_lines(file)]
    documents = {file: unpack_file(file) for file in files}
    if re.fullmatch(BATCH, files[0].name):
        return [
            parse_sample(named(row, SAMPLES, f"{file}, sample {number}"), f"{file}, sample {number}", notes)
            for file, document in documents.items()
            for number, row in enumerate(batch_of(document, file))
        ]
    notes += [BY_MASK, ONE_BATCH]
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
    document = unpack(read_received(file, MOST_BYTES), str(file))
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
    known: dict[str, Any] = {
        "reward": number_or_none(optional(members, "reward"), f"{where}, reward"),
        "where": where,
    }
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
        extras=experts_of(None if experts is None else expert_array(experts), len(tokens), where),
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
        reward=number_or_none(rewards[0], f"{where}, reward") if len(rewards) else None,
        extras=experts_of(experts, len(columns["input_ids"]), where),
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


PACKED = "input_ids loss_mask advantages inference_logprobs position_ids"
MM = "routed_experts mm_kwargs mm_token_type_ids"
OLD_MM = "routed_experts pixel_values pixel_values_shape image_grid_thw mm_token_type_ids"
STREAMS = "rl_weights ce_weights ref_kl_weights"
TEACHER = "teacher_logprobs lora_num_tokens"
MICRO_BATCHES = tuple(
    f"{PACKED} {rest}".split()
    for rest in (
        "temperature",
        "lora_num_tokens temperature",
        f"temperature {TEACHER}",
        f"temperatures {TEACHER}",
        f"temperatures {TEACHER} pixel_values image_grid_thw",
        f"temperatures {TEACHER} routed_experts pixel_values image_grid_thw",
        f"temperatures {TEACHER} routed_experts pixel_values pixel_values_shape image_grid_thw",
        f"temperatures {TEACHER} {OLD_MM}",
        f"temperatures {TEACHER} {OLD_MM} sft_loss",
        f"temperatures env_names {TEACHER} {OLD_MM} training_mode",
        f"temperatures env_names {TEACHER} {MM} training_mode",
        f"temperatures env_names {TEACHER} {MM} training_mode rewards",
        f"temperatures env_names {TEACHER} {MM} training_mode rewards run_id run_step",
        f"temperatures env_names sequence_lengths {TEACHER} {MM} training_mode rewards run_id run_step",
        f"sequence_lengths temperatures env_names {TEACHER} {MM} training_mode rewards run_id run_step",
        f"sequence_lengths temperatures env_names ref_logprobs lora_num_tokens {MM} {STREAMS} run_id run_step",
        f"sequence_lengths temperatures env_names seq_lens ref_logprobs lora_num_tokens {MM} {STREAMS} run_id run_step",
        f"sequence_lengths temperatures env_names seq_lens ref_logprobs {MM} {STREAMS}",
    )
)
SPLIT = "prompt_ids prompt_mask completion_ids completion_mask completion_logprobs"
WHOLE = "token_ids mask logprobs temperatures env_name"
SCORED = "teacher_logprobs advantage reward"
OLD_IMAGES = "pixel_values pixel_values_shape image_grid_thw routed_experts"
SAMPLES = (
    *(
        f"{SPLIT} {rest}".split()
        for rest in (
            "advantage",
            "teacher_logprobs advantage",
            SCORED,
            f"temperatures {SCORED}",
            f"temperatures {SCORED} pixel_values image_grid_thw",
            f"temperatures {SCORED} pixel_values image_grid_thw routed_experts",
            f"temperatures {SCORED} {OLD_IMAGES}",
            f"temperatures {SCORED} {OLD_IMAGES} mm_token_type_ids",
            f"temperatures {SCORED} {OLD_IMAGES} mm_token_type_ids sft_loss",
            f"temperatures env_name {SCORED} {OLD_IMAGES} mm_token_type_ids training_mode",
            f"temperatures env_name {SCORED} mm_kwargs routed_experts mm_token_type_ids training_mode",
        )
    ),
    f"{WHOLE} {SCORED} mm_kwargs routed_experts mm_token_type_ids training_mode".split(),
    f"{WHOLE} ref_logprobs mm_kwargs routed_experts mm_token_type_ids {STREAMS} advantages".split(),
)
# the items of lists, by which layouts of one length differ
TYPES: Mapping[str, type] = {
    **dict.fromkeys(("input_ids", "prompt_ids", "completion_ids", "token_ids", "position_ids"), int),
    **dict.fromkeys(("loss_mask", "prompt_mask", "completion_mask", "mask"), bool),
    **dict.fromkeys(("sequence_lengths", "seq_lens"), int),
    **dict.fromkeys(("temperatures", "teacher_logprobs", "ref_logprobs"), float),
    "env_names": str,
}
OPTIONAL = ("teacher_logprobs", "ref_logprobs")


def named(positions: Any, layouts: Sequence[Sequence[str]], where: str) -> dict[str, Any]:
    """Return the members of a list by name. Raises ForeignFormat if it fits no layout."""
    for layout in layouts:
        if isinstance(positions, list) and len(layout) == len(positions):
            members = dict(zip(layout, positions, strict=True))
            if all(fits(name, value) for name, value in members.items()):
                return members
    size = f"a list of {len(positions)} positions" if isinstance(positions, list) else "no list"
    raise ForeignFormat(f"{where} is {size}, which no known version of prime-rl writes")


def fits(name: str, value: Any) -> bool:
    """Return whether a member has its type: a list is judged by its first item."""
    if name == "env_name":
        return isinstance(value, str)
    if name == "temperature":
        return isinstance(value, int | float)
    if name not in TYPES or (value is None and name in OPTIONAL):
        return True
    kinds = (float, int) if TYPES[name] is float else (TYPES[name],)
    return isinstance(value, list) and (not value or type(value[0]) in kinds)


LARGEST_STEP = 2**26  # tokens of a rank, about 1 GiB
Row = dict[str, np.ndarray]


@dataclass
class Observation:
    """The inputs to the loss of the step in progress: [T] tensors by name for each sequence.

    prime-rl calls its loss once per sequence, without the number of the step: a step ends with the
    first optimizer step after it. Only references are kept until then. `compare` returns statistics
    of the step's sequences.
    """

    recording: Guarded
    step: int
    compare: Callable[[int, list[Row]], dict[str, float]]
    rows: list[dict[str, Any]] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, inputs: Any) -> None:
        """Keep the inputs of a sequence until the step ends."""
        self.recording.attempt(f"step {self.step}", lambda: self.keep(inputs))

    def keep(self, inputs: Any) -> None:
        """Keep references. Raises RecordError if no optimizer of torch ends the step."""
        values = {name: getattr(inputs, name, None) for name in ("loss_mask", "inference_logprobs", *COLUMNS)}
        self.rows.append({name: value.detach() for name, value in values.items() if value is not None})
        self.num_tokens += len(inputs.loss_mask)
        if self.num_tokens > LARGEST_STEP:
            self.rows = []
            raise RecordError(f"no step of a torch optimizer ended these {self.num_tokens} tokens")

    def end_step(self) -> None:
        """Compare and record the sequences of the step; does nothing without any."""
        if not self.rows:
            return
        rows, self.rows, self.num_tokens = self.rows, [], 0
        stats: dict[str, float] = {}

        def samples() -> list[Sample]:
            sequences = [row for row in to_numpy(rows) if row["loss_mask"].any()]
            stats.update(self.compare(self.step, sequences))
            return [sample_of(row) for row in sequences]

        self.recording.step(self.step, samples, stats=stats)
        self.step += 1


def to_numpy(rows: list[dict[str, Any]]) -> list[Row]:
    """Copy the tensors to the host, in one transfer per name."""
    import torch

    result: list[Row] = [{} for _ in rows]
    for name in {name for row in rows for name in row}:
        having = [number for number, row in enumerate(rows) if name in row]
        tensors = [rows[number][name] for number in having]
        joined = torch.cat(tensors)
        values = (joined if joined.dtype == torch.bool else joined.float()).cpu().numpy()
        ends = np.cumsum([len(tensor) for tensor in tensors])
        for number, array in zip(having, np.split(values, ends[:-1]), strict=True):
            result[number][name] = array
    return result


def sample_of(row: Row) -> Sample:
    """Return the sequence as a sample: a loss function sees no token, reward, group or version."""
    return Sample(
        tokens=None,
        loss_mask=row["loss_mask"].astype(np.int32),
        logprobs=row["inference_logprobs"],
        learning={name: row[member] for member, name in COLUMNS.items() if member in row},
    )


def unpack(data: bytes, where: str) -> Any:
    """Decode MessagePack. Raises UnfinishedFile if it ends too early, else ForeignFormat."""
    try:
        return msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        if "truncated" in str(error):
            raise UnfinishedFile(f"{where} is cut off") from None
        raise ForeignFormat(f"{where} is not MessagePack ({printable(str(error), 100)})") from None
