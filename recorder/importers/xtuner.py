"""xtuner: `debug_rollout_{step}.pt`, a `torch.save` of groups of RolloutState (pydantic).

A plain sample has `prompt_ids`, `response_ids` and values of the response. An agent's trace has
`input_ids`, `labels` and `logprobs` of the complete sequence, because its `response_ids` lack the
tokens of tools.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recorder.errors import ForeignFormat
from recorder.importers.foreign import (
    Foreign,
    Step,
    as_tokens,
    completion_sample,
    files_in_order,
    finish_reason_of,
    full_sequence,
    member,
    optional,
)
from recorder.importers.stand_ins import Instance
from recorder.importers.unpickle import load_pickle
from recorder.trainers.sample import Sample

IGNORED = -100  # label of a token that is not trained on
NOTES = (
    "advantages are computed again from the rewards, by group",
    "weight versions are not in the file",
    "weights and optimizer are not in the file: choose the model for a replay",
)


def recognises(path: Path) -> bool:
    """Return whether the path has files `debug_rollout_*.pt`."""
    files = files_of(path)
    return bool(files) and files[0].name.startswith("debug_rollout_")


def files_of(path: Path) -> list[Path]:
    """List the files of the steps, in order."""
    return files_in_order(path, "debug_rollout_*.pt")


def read(path: Path) -> Foreign:
    """Read one step per file. Raises ForeignFormat, UnsafePickle."""
    steps = []
    for file in files_of(path):
        groups = load_pickle(file)
        if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
            raise ForeignFormat(f"{file} has no list of groups")
        samples = [
            parse_state(state, number, f"{file}, group {number}, sample {index}")
            for number, group in enumerate(groups)
            for index, state in enumerate(group)
        ]
        steps.append(Step(file.stem, samples))
    return Foreign("xtuner", steps, NOTES)


def parse_state(state: Any, group: int, where: str) -> Sample:
    """Parse one RolloutState."""
    if not isinstance(state, Instance) or not isinstance(state.state, dict):
        raise ForeignFormat(f"{where} is not a RolloutState")
    fields = member(state.state, "__dict__", where)
    fields = optional(fields, "extra_fields", {}) | fields
    reward = optional(fields, "reward")
    reward = reward["score"] if isinstance(reward, dict) else reward
    reason = finish_reason_of(optional(fields, "finish_reason"))
    if "labels" in fields:
        return parse_trace(fields, reward, group, reason, where)
    return completion_sample(
        member(fields, "prompt_ids", where),
        member(fields, "response_ids", where),
        loss_mask=optional(fields, "response_mask"),
        logprobs=optional(fields, "logprobs"),
        reward=None if reward is None else float(reward),
        group=group,
        finish_reason=reason,
        text=("", optional(fields, "response", "")),
        where=where,
    )


def parse_trace(fields: Mapping[str, Any], reward: Any, group: int, reason: int, where: str) -> Sample:
    """Parse a complete sequence, in which labels define the loss mask."""
    tokens = as_tokens(np.asarray(fields["input_ids"], np.int64), where)
    labels = np.asarray(fields["labels"], np.int64)
    trained = labels != IGNORED
    if len(labels) != len(tokens) or not np.array_equal(labels[trained], tokens[trained]):
        raise ForeignFormat(f"{where}: its labels are neither the token itself nor {IGNORED}")
    mask = trained.astype(np.int32)
    logprobs = optional(fields, "logprobs")
    return Sample(
        tokens=tokens,
        loss_mask=mask,
        logprobs=None if logprobs is None else full_sequence(logprobs, mask, np.float32),
        reward=None if reward is None else float(reward),
        group=group,
        finish_reason=reason,
    )
