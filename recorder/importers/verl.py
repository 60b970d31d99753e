"""verl: `gen_batch.dp` of its RolloutSkip, a pickled DataProto, alone or in a folder per step.

The pickled state is (tensors, non-tensors, meta info); tensors are the bytes of a `torch.save` of a
TensorDict, or, with `VERL_DATAPROTO_SERIALIZATION_METHOD=numpy`, (batch size, device, {key: (dtype,
shape, bytes)}). Prompts are padded on the left, responses on the right. Up to version 0.6 there is
one file, whose name ends in `_GBS{size}__N{n}`; the trainer with a TransferQueue writes
`tq_batch.pt` with rows that are not padded.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recorder.errors import ForeignFormat
from recorder.importers.foreign import (
    BY_PROMPT,
    NO_WEIGHTS,
    Foreign,
    completion_sample,
    experts_of,
    member,
    optional,
)
from recorder.importers.sources import Source, cut_off, incomplete, of_one_run, read_steps, two_runs
from recorder.importers.stand_ins import TORCH_TYPES, Instance
from recorder.importers.unpickle import load_bytes, load_pickle
from recorder.pictures.imported import counted, pictures_in
from recorder.trainers.sample import LEARNING, Sample

BATCH, QUEUE = "gen_batch.dp", "tq_batch.pt"
FIRST_VERSIONS = r".*_GBS\d+__N\d+"
NOTES = (NO_WEIGHTS, "finish reasons are not in the file")
VERSIONS = (
    "the file has the first and last weight version of a sample: where they differ, versions are unknown"
)
ADJACENT = "the file has no uid: n adjacent samples are a group, as in the name of the folder"
NEEDED = ("prompts", "responses", "response_mask")
COLUMNS = {
    "advantages": "advantages",
    "returns": "returns",
    "old_log_probs": LEARNING["old_logprobs"],
    "ref_log_prob": LEARNING["ref_logprobs"],
    "values": "values",
}


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
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else values


def parse_rows(
    tensors: Mapping[str, np.ndarray], others: Mapping[str, Any], file: Path, notes: list[str]
) -> list[Sample]:
    where = str(file)
    prompts, responses = member(tensors, "prompts", where), member(tensors, "responses", where)
    attention = np.asarray(member(tensors, "attention_mask", where)).astype(bool)
    width = prompts.shape[1]
    unpadded = [prompts[row][attention[row, :width]] for row in range(len(prompts))]
    groups = groups_of(others, unpadded, file, notes)
    response_mask = optional(tensors, "response_mask", attention[:, width:])
    columns = {key: tensors[key] for key in ("rollout_log_probs", *COLUMNS) if key in tensors}
    samples = []
    for row, prompt in enumerate(unpadded):
        kept = attention[row, width:]
        row_tensors = {key: values[row][kept] for key, values in columns.items()}
        if "routed_experts" in tensors:
            row_tensors["routed_experts"] = tensors["routed_experts"][row][attention[row]]
        if "rm_scores" in tensors:
            row_tensors["rm_scores"] = tensors["rm_scores"][row]
        row_tensors |= {"prompts": prompt, "responses": responses[row][kept]}
        row_tensors["response_mask"] = response_mask[row][kept]
        pictures = pictures_of(others, row, notes)
        samples.append(parse_row(row_tensors, others, row, groups[row], pictures, f"{where}, row {row}"))
    notes.append(versions_note(others))
    return samples


def parse_row(
    tensors: Mapping[str, np.ndarray],
    others: Mapping[str, Any],
    row: int,
    group: Hashable,
    pictures: Mapping[str, Any],
    where: str,
) -> Sample:
    """Build the sample of tensors without padding."""
    size = len(tensors["responses"])
    experts, scores = (optional(tensors, name) for name in ("routed_experts", "rm_scores"))
    first, last = (optional(others, f"{name}_global_steps") for name in ("min", "max"))
    version = None if first is None or last is None or first[row] != last[row] else first[row]
    return completion_sample(
        tensors["prompts"],
        tensors["responses"],
        loss_mask=tensors["response_mask"],
        logprobs=optional(tensors, "rollout_log_probs"),
        versions=None if version is None else np.full(size, int(version)),
        learning={name: optional(tensors, key) for key, name in COLUMNS.items()},
        reward=None if scores is None else float(np.sum(scores)),
        group=group,
        extras={} if experts is None else experts_of(experts, len(tensors["prompts"]) + size, where),
        **pictures,
        where=where,
    )


def pictures_of(others: Mapping[str, Any], row: int, notes: list[str]) -> dict[str, Any]:
    """Return the pictures of a row: those of the data set, or what the processor made of them."""
    columns = [stacked(optional(others, name, ())) for name in ("multi_modal_inputs", "multi_modal_data")]
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
    return VERSIONS if "min_global_steps" in others else "weight versions are not in the file"


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
    inputs = {name: tensors[name] for name in ("multi_modal_inputs", "multi_modal_data") if name in tensors}
    names = (*NEEDED, "rollout_log_probs", "rm_scores", "routed_experts", *COLUMNS)
    columns = {name: tensors[name] for name in names if optional(tensors, name) is not None}
    others = {name: [tag.get(name) for tag in tags] for name in ("min_global_steps", "max_global_steps")}
    others |= inputs
    notes.append(versions_note(others))
    return [
        parse_row(
            {name: np.asarray(values[row]) for name, values in columns.items()},
            others,
            row,
            str(key).rsplit("_", 2)[0],
            pictures_of(others, row, notes),
            f"{file}, {key}",
        )
        for row, key in enumerate(document["keys"])
    ]
