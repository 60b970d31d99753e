"""verl: `gen_batch.dp` of its RolloutSkip, a pickled DataProto, alone or in a folder per step.

The pickled state is (tensors, non-tensors, meta info); tensors are the bytes of a `torch.save` of a
TensorDict, or, with `VERL_DATAPROTO_SERIALIZATION_METHOD=numpy`, (batch size, device, {key: (dtype,
shape, bytes)}). Prompts are padded on the left, responses on the right.
"""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recorder.errors import ForeignFormat
from recorder.importers.foreign import Foreign, Step, completion_sample, member, number_in, optional
from recorder.importers.stand_ins import TORCH_TYPES, Instance
from recorder.importers.unpickle import load_bytes, load_pickle
from recorder.trainers.sample import Sample

NOTES = (
    "weights and optimizer are not in the file: choose the model for a replay",
    "weight versions and finish reasons are not in the file",
)
NO_UID = "the file has no uid: samples with the same prompt tokens are a group"
NO_REWARD = "the file has no rewards (no rm_scores): 0 is recorded"


def recognises(path: Path) -> bool:
    """Return whether the path is a file `*.dp`, or has such files in it or one level below."""
    return bool(batch_files(path))


def batch_files(path: Path) -> list[Path]:
    """List the files in the order of their steps."""
    if path.is_file():
        return [path] if path.suffix == ".dp" else []
    return sorted(path.rglob("*.dp"), key=lambda file: (number_in(file.parent.name), str(file)))


def read(path: Path) -> Foreign:
    """Read one step per file. Raises ForeignFormat, UnsafePickle."""
    steps, notes = [], list(NOTES)
    for file in batch_files(path):
        tensors, others = read_proto(load_pickle(file), str(file))
        steps.append(Step(file.parent.name, parse_rows(tensors, others, str(file))))
        notes += [] if "uid" in others else [NO_UID]
        notes += [] if "rm_scores" in tensors else [NO_REWARD]
    return Foreign("verl", steps, list(dict.fromkeys(notes)))


def read_proto(proto: Any, where: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return tensors and non-tensors of a DataProto, of verl or of ROLL."""
    if not isinstance(proto, Instance) or not isinstance(proto.state, list):
        raise ForeignFormat(f"{where} has no pickled DataProto")
    packed, others, *_ = proto.state
    if isinstance(packed, bytes):
        tensors = load_bytes(packed, where)
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


def parse_rows(tensors: Mapping[str, np.ndarray], others: Mapping[str, Any], where: str) -> list[Sample]:
    """Parse all rows."""
    prompts, responses = member(tensors, "prompts", where), member(tensors, "responses", where)
    attention = np.asarray(member(tensors, "attention_mask", where)).astype(bool)
    width = prompts.shape[1]
    response_mask = optional(tensors, "response_mask", attention[:, width:])
    uids = optional(others, "uid")
    samples = []
    for row in range(len(prompts)):
        prompt = prompts[row][attention[row, :width]]
        kept = attention[row, width:]
        group: Hashable = prompt.tobytes() if uids is None else str(uids[row])
        samples.append(
            completion_sample(
                prompt,
                responses[row][kept],
                loss_mask=response_mask[row][kept],
                logprobs=tensors["rollout_log_probs"][row][kept] if "rollout_log_probs" in tensors else None,
                reward=float(tensors["rm_scores"][row].sum()) if "rm_scores" in tensors else None,
                group=group,
                where=f"{where}, row {row}",
            )
        )
    return samples
