"""ROLL: `{dump_dir}/{train|val}/step_000042.pkl`, a pickled DataProto.

Tensors are in a pickled `io.BytesIO`. Agentic batches are padded on the right to a fixed width:
`input_ids` and `response_mask` are complete sequences, `infer_logprobs` [B, L - 1] belongs to token
t + 1. RLVR batches have `prompts` and `responses` as in verl, and rewards in float16.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recorder.trainers.foreign import (
    BY_PROMPT,
    NO_VERSIONS_OR_REASONS,
    NO_WEIGHTS,
    completion_sample,
    member,
    optional,
    prompt_group,
    sequence_sample,
)
from recorder.trainers.sample import LEARNING, Sample
from recorder.trainers.unpickle import load_pickle
from recorder.trainers.verl import read_proto

FILES = r"step_\d+\.pkl"
NOTES = (NO_WEIGHTS, NO_VERSIONS_OR_REASONS)
# [B, L - 1], next-token aligned -> their names in learning
COLUMNS = {
    "advantages": "advantages",
    "returns": "returns",
    "old_log_probs": LEARNING["old_logprobs"],
    "ref_log_probs": LEARNING["ref_logprobs"],
    "values": "values",
}


def read_batch(file: Path, notes: list[str]) -> list[Sample]:
    """Read the rows of a file; add to the notes what they lack. Raises ForeignFormat, UnsafePickle."""
    tensors, others = read_proto(load_pickle(file), str(file))
    notes += [] if "traj_group_id" in others else [BY_PROMPT]
    num_rows = len(member(tensors, "input_ids", str(file)))
    return [parse_row(tensors, others, row, f"{file}, row {row}") for row in range(num_rows)]


def parse_row(tensors: Mapping[str, np.ndarray], others: Mapping[str, Any], row: int, where: str) -> Sample:
    """Parse one row of either kind of batch."""
    group = str(others["traj_group_id"][row]) if "traj_group_id" in others else None
    if "prompts" in tensors:
        return rlvr_row(tensors, row, group, where)
    kept = tensors["attention_mask"][row].astype(bool)

    def column(name: str) -> Any:
        """Return values of a next-token aligned tensor for the tokens themselves."""
        return None if name not in tensors else np.concatenate([[0], tensors[name][row]])[kept]

    mask = member(tensors, "response_mask", where)[row][kept]
    tokens = tensors["input_ids"][row][kept]
    known: dict[str, Any] = {}
    if "prompt_mask" in tensors:
        known["prompt_length"] = int(np.count_nonzero(tensors["prompt_mask"][row][kept]))
    return sequence_sample(
        tokens,
        mask,
        logprobs=column("infer_logprobs"),
        learning={name: column(key) for key, name in COLUMNS.items()},
        reward=float(np.sum(tensors["scores"][row])) if "scores" in tensors else None,
        group=prompt_group(tokens, mask) if group is None else group,
        where=where,
        **known,
    )


def rlvr_row(tensors: Mapping[str, np.ndarray], row: int, group: str | None, where: str) -> Sample:
    width = tensors["prompts"].shape[1]
    attention = tensors["attention_mask"][row].astype(bool)
    prompt = tensors["prompts"][row][attention[:width]]
    kept = attention[width:]

    def column(name: str) -> Any:
        """Return the values of the response, which are the last ones of a row."""
        return None if name not in tensors else tensors[name][row][-len(kept) :][kept]

    rewards = optional(tensors, "response_level_rewards", optional(tensors, "scores"))
    return completion_sample(
        prompt,
        tensors["responses"][row][kept],
        loss_mask=column("response_mask"),
        logprobs=column("infer_logprobs"),
        learning={name: column(key) for key, name in COLUMNS.items()},
        reward=None if rewards is None else float(np.sum(rewards[row])),
        group=prompt.tobytes() if group is None else group,
        where=where,
    )
