"""verl: record a step of a trainer that is built on it; import the batches of its RolloutSkip.

A trainer's batch is a DataProto with prompts padded on the left and responses on the right, or a
KVBatchMeta that names rows of a TransferQueue. `areal_debug.verl` wraps verl's own trainers;
docs/trainers/verl.md says what is recorded.

A file is `gen_batch.dp`, a pickled DataProto, alone or in a folder per step. The pickled state is
(tensors, non-tensors, meta info); tensors are the bytes of a `torch.save` of a TensorDict, or, with
`VERL_DATAPROTO_SERIALIZATION_METHOD=numpy`, (batch size, device, {key: (dtype, shape, bytes)}). Up
to version 0.6 there is one file, whose name ends in `_GBS{size}__N{n}`; the trainer with a
TransferQueue writes `tq_batch.pt` with rows that are not padded.
"""

import os
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recorder.errors import ForeignFormat
from recorder.tensors import float32_of_bits
from recorder.trainers.file_pictures import pictures_in
from recorder.trainers.foreign import (
    BY_PROMPT,
    NO_WEIGHTS,
    Foreign,
    Source,
    completion_sample,
    counted,
    cut_off,
    experts_of,
    incomplete,
    member,
    of_one_run,
    optional,
    read_steps,
    two_runs,
)
from recorder.trainers.guarded import Guarded
from recorder.trainers.sample import Sample, as_numpy
from recorder.trainers.stand_ins import TORCH_TYPES, Instance
from recorder.trainers.unpickle import load_bytes, load_pickle

BATCH, QUEUE = "gen_batch.dp", "tq_batch.pt"
FIRST_VERSIONS = r".*_GBS\d+__N\d+"
NOTES = (NO_WEIGHTS, "finish reasons are not in the file")
SOME_VERSIONS = (
    "the file has the first and last weight version of a sample: where they differ, versions are unknown"
)
ADJACENT = "the file has no uid: n adjacent samples are a group, as in the name of the folder"
# inputs to the loss -> their names in a record
LEARNING = {
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
    "old_log_probs": "prox_logp",
    "ref_log_prob": "ref_logp",
    "token_level_rewards": "token_level_rewards",
    "rollout_is_weights": "rollout_is_weights",
    "entropy": "entropy",
}
NEEDED = ("prompts", "responses", "response_mask")
EXPERTS, IMAGES = "routed_experts", "multi_modal_inputs"
REWARDS = ("token_level_scores", "rm_scores")  # the first is the sum of all terms
PER_TOKEN = (*NEEDED, "rollout_log_probs", *REWARDS, *LEARNING, EXPERTS)
DERIVED = ("input_ids", "attention_mask", "position_ids", "loss_mask")  # nothing is lost without them
VERSIONS = ("min_global_steps", "max_global_steps")  # of the weights that sampled a row
recorders: dict[str, Guarded] = {}


@dataclass(frozen=True)
class Rows:
    """A batch of verl, without padding.

    Attributes:
        tokens: by name, one array per row: [completion, ...] or [prompt and completion, ...].
        others: by name, one value per row.
        dropped: names of tensors that are not recorded.
    """

    tokens: Mapping[str, Sequence[np.ndarray]]
    others: Mapping[str, Sequence[Any]]
    dropped: Collection[str] = ()

    def sample(self, row: int, where: str, **known: Any) -> Sample:
        """Return a row as a sample; `known` are its group, and further members of Sample."""
        values = {name: column[row] for name, column in self.tokens.items()}
        rewards = [float(values[name].sum()) for name in REWARDS if name in values]
        size = len(values["responses"])
        first, last = (optional(self.others, name, [None] * (row + 1))[row] for name in VERSIONS)
        version = first if first == last else None
        return completion_sample(
            values["prompts"],
            values["responses"],
            loss_mask=values.get("response_mask"),
            logprobs=values.get("rollout_log_probs"),
            versions=None if version is None else np.full(size, int(version)),
            learning={name: values.get(key) for key, name in LEARNING.items()},
            reward=rewards[0] if rewards else None,
            extras=experts_of(values.get(EXPERTS), len(values["prompts"]) + size, where),
            where=where,
            **known,
        )


def unpadded(tensors: Mapping[str, Any], attention: np.ndarray) -> dict[str, list[np.ndarray]]:
    """Return the rows of the tensors of PER_TOKEN: the last columns, or of prompts the first."""
    width, tokens = tensors["prompts"].shape[1], {}
    for name in PER_TOKEN:
        if name in tensors:
            values = as_numpy(tensors[name], name)
            kept = attention[:, :width] if name == "prompts" else attention[:, -values.shape[1] :]
            tokens[name] = [values[row][kept[row]] for row in range(len(values))]
    return tokens


def record_step(
    data: Any,
    step: int,
    folder: str | os.PathLike[str],
    *,
    version: int | None = None,
    stats: Mapping[str, Any] | None = None,
    trainer: Any = None,
) -> None:
    """Record a step of a trainer that is built on verl.

    It raises nothing: the first failure is one sentence on stderr, and recording ends.

    Args:
        data: DataProto with prompts padded on the left and responses on the right, or KVBatchMeta.
        step: its number; numbers ascend.
        folder: of the record, which ends with the process; a record in it is continued.
        version: weight version after the step; unless given, one more than before.
        stats: numbers by name; other values are left out.
        trainer: has the `config` and the `tokenizer` of the run, read at the first step.
    """
    recorder = recorder_in(folder, trainer)
    recorder.attempt(f"step {step}", lambda: write(recorder, data, step, version, stats, trainer))


def recorder_in(folder: str | os.PathLike[str], trainer: Any) -> Guarded:
    key = os.fspath(folder)
    if key not in recorders:
        recorders[key] = Guarded("verl", key, tokenizer=getattr(trainer, "tokenizer", None))
    return recorders[key]


def write(
    recorder: Guarded,
    data: Any,
    step: int,
    version: int | None,
    stats: Mapping[str, Any] | None,
    trainer: Any,
) -> None:
    rows = rows_of_queue(data) if hasattr(data, "partition_id") else rows_of_proto(data)
    config = config_of(trainer) if recorder.recorder is None else None
    recorder.step(
        step,
        lambda: samples_of(rows),
        not_recorded=rows.dropped,
        config=config,
        version=version,
        stats=stats,
    )


def config_of(trainer: Any) -> Any:
    """Return the options of the run, resolved; None if they are not known."""
    from omegaconf import OmegaConf

    config = getattr(trainer, "config", None)
    return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config


def rows_of_proto(data: Any) -> Rows:
    tokens = unpadded(data.batch, as_numpy(data.batch["attention_mask"], "attention_mask").astype(bool))
    others = {name: values.tolist() for name, values in data.non_tensor_batch.items()}
    others |= {name: values.tolist() for name, values in data.batch.items() if values.ndim == 1}
    dropped = set(data.batch.keys()) - {*tokens, *DERIVED, *others}
    dropped |= {IMAGES} if any(others.get(IMAGES, ())) else set()
    return Rows(tokens, others, dropped)


def rows_of_queue(batch: Any) -> Rows:
    """Return the rows that a KVBatchMeta names in TransferQueue, without those verl pads with."""
    import transfer_queue as queue

    rows = [row for row, tag in enumerate(batch.tags) if not tag.get("is_padding")]
    keys = [batch.keys[row] for row in rows]
    per_row = ["uid", "num_turns", "extra_fields"]
    # a field that there is not is left out
    data = queue.kv_batch_get(keys, batch.partition_id, [*PER_TOKEN, *per_row])
    tokens = {
        name: [as_numpy(values, name) for values in data[name].unbind()] for name in PER_TOKEN if name in data
    }
    others = {name: as_list(data[name]) for name in per_row if name in data}
    extra = [row.get("reward_extra_info") or {} for row in others.pop("extra_fields", ())]
    others |= {name: [row.get(name) for row in extra] for name in {name for row in extra for name in row}}
    others |= {name: [batch.tags[row].get(name) for row in rows] for name in VERSIONS}
    images = queue.kv_batch_get(keys[:1], batch.partition_id, [IMAGES]).get(IMAGES, ())
    return Rows(tokens, others, [IMAGES] if any(as_list(images)) else [])


def as_list(column: Any) -> list[Any]:
    """Return the values of a column that is not a tensor: a stack of TensorDict, or a list."""
    return column.tolist() if hasattr(column, "tolist") else list(column)


def samples_of(rows: Rows) -> list[Sample]:
    numbers = {
        name: column
        for name, column in rows.others.items()
        if all(value is None or isinstance(value, bool | int | float) for value in column)
    }

    def scores_of(row: int) -> dict[str, float | None]:
        return {name: None if column[row] is None else float(column[row]) for name, column in numbers.items()}

    groups = rows.others.get("uid")
    return [
        rows.sample(
            row, f"sample {row}", group=None if groups is None else str(groups[row]), scores=scores_of(row)
        )
        for row in range(len(rows.tokens["prompts"]))
    ]


def record_update(
    recorder: Guarded, trainer: Any, batch: Any, result: Any, metrics: Mapping[str, Any] | None = None
) -> None:
    step, version = count(trainer)
    if metrics is None and result is not None:
        from verl.utils.metric import reduce_metrics

        metrics = reduce_metrics(dict(result.meta_info["metrics"]))
    write(recorder, batch, step, version, metrics, trainer)


def count(trainer: Any) -> tuple[int, int]:
    """Return the number of an update and the weight version after it, as rollouts name it.

    A step of an asynchronous trainer may have several updates, the last of which is synchronised.
    """
    step: int = trainer.global_steps
    if hasattr(trainer, "parameter_sync_step"):
        updates, done = trainer.parameter_sync_step, trainer.local_trigger_step + 1
        return (step - 1) * updates + done, step - (done < updates)
    if hasattr(trainer, "current_param_version"):
        last = trainer.local_trigger_step == trainer.trigger_parameter_sync_step
        return step, trainer.current_param_version + last
    return step, step


def find(source: Source) -> list[Path]:
    """Return the batches of steps."""
    if source.path.suffix == ".dp":
        return list(source.files)
    return source.named(f"{BATCH}|{QUEUE}") or source.named(FIRST_VERSIONS)


def read(source: Source, files: Sequence[Path]) -> Foreign:
    """Read one step per file. Raises ForeignFormat, UnsafePickle."""
    notes: list[str] = []
    if len(files) > 1 and re.fullmatch(FIRST_VERSIONS, files[0].name):
        raise two_runs(*files[:2])
    queues: dict[Path, list[Path]] = {}
    for file in of_one_run([file for file in files if file.name == QUEUE], 3):
        queues.setdefault(file.parents[1], []).append(file)  # step/number/tq_batch.pt
    partial = incomplete(queues)
    units = [(folder.name, paths) for folder, paths in queues.items() if folder not in partial]
    for file in of_one_run([file for file in files if file.name != QUEUE], 2):
        units.append((file.parent.name if file.suffix else file.name, [file]))
    steps, left_out = read_steps(
        units, lambda paths: [sample for path in paths for sample in read_file(path, notes)]
    )
    for folder in partial:
        left_out += cut_off(queues[folder], lambda paths: read_file(paths[0], []))
    left_out += partial.values()
    return Foreign("verl", steps, [*NOTES, *counted(notes), *left_out])


def read_file(file: Path, notes: list[str]) -> list[Sample]:
    """Read the rows of a file; add to the notes what they lack."""
    document = load_pickle(file)
    if file.name == QUEUE:
        return read_queue(document, file, notes)
    tensors, others = read_proto(document, str(file))
    before = file.with_name("new_batch.dp")  # the prompts, which have the uids in versions 0.7 and 0.8
    if "uid" not in others and before.is_file():
        others = read_proto(load_pickle(before), str(before))[1] | others
    return parse_rows(tensors, others, file, notes)


def read_proto(proto: Any, where: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return tensors and non-tensors of a DataProto, of verl or of ROLL."""
    if not isinstance(proto, Instance) or not isinstance(proto.state, list):
        raise ForeignFormat(f"{where} has no pickled DataProto")
    packed, others, *_ = proto.state
    if isinstance(packed, bytes):
        tensors = load_bytes(packed, where) or {}
    elif isinstance(packed, list):
        _, _, arrays = packed
        tensors = {key: unpack(array, f"{where}, {key}") for key, array in arrays.items()}
    else:
        raise ForeignFormat(f"{where}: its tensors are neither bytes nor a list")
    return tensors, others


def unpack(packed: Sequence[Any], where: str) -> np.ndarray:
    """Unpack one tensor from `(dtype, shape, bytes)`."""
    if len(packed) != 3 or packed[0] not in TORCH_TYPES:
        raise ForeignFormat(f"{where} is a nested tensor or of an unknown type")
    dtype, shape, data = packed
    values = np.frombuffer(bytes(data), TORCH_TYPES[dtype]).reshape([int(size) for size in shape])
    return float32_of_bits(values) if dtype == "bfloat16" else values


def parse_rows(
    tensors: Mapping[str, np.ndarray], others: Mapping[str, Any], file: Path, notes: list[str]
) -> list[Sample]:
    where = str(file)
    for name in ("prompts", "responses"):
        member(tensors, name, where)
    attention = np.asarray(member(tensors, "attention_mask", where)).astype(bool)
    rows = Rows(unpadded(tensors, attention), others)
    groups = groups_of(others, rows.tokens["prompts"], file, notes)
    notes.append(versions_note(others))
    return [
        rows.sample(row, f"{where}, row {row}", group=groups[row], **pictures_of(others, row, notes))
        for row in range(len(groups))
    ]


def pictures_of(others: Mapping[str, Any], row: int, notes: list[str]) -> dict[str, Any]:
    """Return the pictures of a row: those of the data set, or what the processor made of them."""
    columns = [stacked(optional(others, name, ())) for name in (IMAGES, "multi_modal_data")]
    inputs, data = (column[row] if row < len(column) else None for column in columns)
    return pictures_in(inputs, data, notes)


def groups_of(
    others: Mapping[str, Any], prompts: Sequence[np.ndarray], file: Path, notes: list[str]
) -> list[Hashable]:
    """Return the group of each row: its uid, or that of n adjacent rows, or its prompt."""
    num_rows, uids = len(prompts), optional(others, "uid", ())
    if len(uids) and num_rows % len(uids) == 0:
        return [str(uid) for uid in uids for _ in range(num_rows // len(uids))]
    found = re.search(r"GBS\d+_+N(\d+)", str(file))
    size = int(found[1]) if found else 0
    names: list[Hashable] = [prompt.tobytes() for prompt in prompts]
    is_whole = size > 0 and num_rows % size == 0
    if is_whole and all(names[row] == names[row - row % size] for row in range(num_rows)):
        notes.append(ADJACENT)
        return [row // size for row in range(num_rows)]
    notes.append(BY_PROMPT)
    return names


def versions_note(others: Mapping[str, Any]) -> str:
    return SOME_VERSIONS if "min_global_steps" in others else "weight versions are not in the file"


def stacked(values: Any) -> Sequence[Any]:
    """Return the items of a list, or of tensordict's NonTensorStack."""
    if not isinstance(values, Instance):
        return list(values)
    return [item.state["non_tensordict"]["data"] for item in values.state["tensordicts"]]


def read_queue(document: Any, file: Path, notes: list[str]) -> list[Sample]:
    """Read the rows of a batch of the TransferQueue, whose keys are `{uid}_{session}_{number}`."""
    if not isinstance(document, dict) or not document.keys() >= {"tensordict", "keys"}:
        raise ForeignFormat(f"{file} has no tensordict and keys of a TransferQueue")
    tensors, tags = document["tensordict"], optional(document, "tags", [])
    for name in NEEDED:
        member(tensors, name, str(file))
    columns = {
        name: list(map(np.asarray, tensors[name]))
        for name in PER_TOKEN
        if optional(tensors, name) is not None
    }
    others = {name: [tag.get(name) for tag in tags] for name in VERSIONS}
    others |= {name: tensors[name] for name in (IMAGES, "multi_modal_data") if name in tensors}
    notes.append(versions_note(others))
    rows = Rows(columns, others)
    return [
        rows.sample(
            row, f"{file}, {key}", group=str(key).rsplit("_", 2)[0], **pictures_of(others, row, notes)
        )
        for row, key in enumerate(document["keys"])
    ]
