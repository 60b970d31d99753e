"""ROLL: `{dump_dir}/{train|val}/step_000042.pkl`, a pickled DataProto.

Tensors are in a pickled `io.BytesIO`. Agentic batches are padded on the right to a fixed width:
`input_ids` and `response_mask` are complete sequences, `infer_logprobs` [B, L - 1] belongs to token
t + 1. RLVR batches have `prompts` and `responses` as in verl, and rewards in float16.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recorder.importers.foreign import (
    Foreign,
    Step,
    as_tokens,
    completion_sample,
    files_in_order,
    full_sequence,
    member,
    optional,
)
from recorder.importers.unpickle import load_pickle
from recorder.importers.verl import read_proto
from recorder.trainers.sample import Sample

NOTES = (
    "weights and optimizer are not in the file: choose the model for a replay",
    "weight versions and finish reasons are not in the file",
)
GROUPS_NOTE = "the file does not name groups: samples with the same prompt tokens are a group"


def recognises(path: Path) -> bool:
    """Return whether the path is a file `step_*.pkl`, or a folder of such files, or of `train`."""
    files = step_files(path)
    return bool(files) and files[0].suffix == ".pkl" and files[0].stem.startswith("step_")


def step_files(path: Path) -> list[Path]:
    """List the files of training steps, in order."""
    return files_in_order(path / "train" if (path / "train").is_dir() else path, "step_*.pkl")


def read(path: Path) -> Foreign:
    """Read one step per file. Raises ForeignFormat, UnsafePickle."""
    steps, notes = [], list(NOTES)
    for file in step_files(path):
        tensors, others = read_proto(load_pickle(file), str(file))
        steps.append(
            Step(
                file.stem,
                [parse_row(tensors, others, row, str(file)) for row in range(num_rows(tensors, file))],
            )
        )
        notes += [] if "traj_group_id" in others else [GROUPS_NOTE]
    return Foreign("roll", steps, list(dict.fromkeys(notes)))


def num_rows(tensors: Mapping[str, np.ndarray], file: Path) -> int:
    """Number of rows of a batch."""
    return len(member(tensors, "input_ids", str(file)))


def parse_row(tensors: Mapping[str, np.ndarray], others: Mapping[str, Any], row: int, where: str) -> Sample:
    """Parse one row of either kind of batch."""
    where = f"{where}, row {row}"
    group = others["traj_group_id"][row] if "traj_group_id" in others else None
    if "prompts" in tensors:
        return rlvr_row(tensors, row, group, where)
    kept = tensors["attention_mask"][row].astype(bool)
    mask = member(tensors, "response_mask", where)[row][kept].astype(np.int32)
    tokens = as_tokens(tensors["input_ids"][row][kept], where)
    logprobs = None
    if "infer_logprobs" in tensors:
        shifted = np.concatenate([[0], tensors["infer_logprobs"][row]])
        logprobs = full_sequence(shifted[kept], mask, np.float32)
    first = int(mask.argmax()) if mask.any() else len(tokens)
    return Sample(
        tokens=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        reward=float(np.sum(tensors["scores"][row])) if "scores" in tensors else None,
        group=tokens[:first].tobytes() if group is None else str(group),
    )


def rlvr_row(tensors: Mapping[str, np.ndarray], row: int, group: Any, where: str) -> Sample:
    """Parse one row of a batch with left-padded prompts."""
    width = tensors["prompts"].shape[1]
    attention = tensors["attention_mask"][row].astype(bool)
    prompt = tensors["prompts"][row][attention[:width]]
    kept = attention[width:]
    logprobs = optional(tensors, "infer_logprobs")
    rewards = optional(tensors, "response_level_rewards", optional(tensors, "scores"))
    return completion_sample(
        prompt,
        tensors["responses"][row][kept],
        loss_mask=tensors["response_mask"][row][-len(kept) :][kept] if "response_mask" in tensors else None,
        logprobs=None if logprobs is None else logprobs[row][-len(kept) :][kept],
        reward=None if rewards is None else float(np.sum(rewards[row])),
        group=prompt.tobytes() if group is None else str(group),
        where=where,
    )
