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
from recorder.trainers.file_pictures import pictures_in
from recorder.trainers.foreign import (
    FROM_REWARDS,
    NO_WEIGHTS,
    as_tokens,
    completion_sample,
    experts_of,
    finish_reason_of,
    member,
    number_or_none,
    optional,
    sequence_sample,
)
from recorder.trainers.sample import Sample
from recorder.trainers.stand_ins import Instance
from recorder.trainers.unpickle import load_pickle

FILES = r"debug_rollout_\d+\.pt"
IGNORED = -100  # label of a token that is not trained on
NOTES = (FROM_REWARDS, NO_WEIGHTS)
EXPERTS = "routed experts are in Ray's memory or in other files, and not imported"


def read_groups(file: Path, notes: list[str]) -> list[Sample]:
    """Read the rows of a file. Raises ForeignFormat, UnsafePickle."""
    groups = load_pickle(file)
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise ForeignFormat(f"{file} has no list of groups")
    return [
        parse_state(state, number, f"{file}, group {number}, sample {index}", notes)
        for number, group in enumerate(groups)
        for index, state in enumerate(group)
    ]


def parse_state(state: Any, group: int, where: str, notes: list[str]) -> Sample:
    if not isinstance(state, Instance) or not isinstance(state.state, dict):
        raise ForeignFormat(f"{where} is not a RolloutState")
    fields = member(state.state, "__dict__", where)
    fields = optional(fields, "extra_fields", {}) | fields
    reward = optional(fields, "reward")
    known: dict[str, Any] = {
        "reward": number_or_none(
            optional(reward, "score") if isinstance(reward, dict) else reward, f"{where}, reward"
        ),
        "group": group,
        "finish_reason": finish_reason_of(optional(fields, "finish_reason")),
        "where": where,
    }
    inputs = {name: value_of(value) for name, value in (optional(fields, "mm_info") or {}).items()}
    known |= pictures_in(inputs, None, notes)
    if optional(fields, "labels") is not None:
        return parse_trace(fields, known)
    # `prompt_ids` of a prompt with images have one placeholder for each, those of training have all
    name = "train_prompt_ids" if "train_prompt_ids" in fields else "prompt_ids"
    prompt, response = member(fields, name, where), member(fields, "response_ids", where)
    experts, versions = experts_in(fields, notes), optional(fields, "response_model_steps")
    mask = optional(fields, "response_mask")
    return completion_sample(
        prompt,
        response,
        loss_mask=mask,
        logprobs=optional(fields, "logprobs"),
        versions=versions if versions is None or mask is None else np.where(mask, versions, -1),
        text=("", optional(fields, "response", "")),
        extras=experts_of(experts, len(prompt) + len(response), where),
        **known,
    )


def parse_trace(fields: Mapping[str, Any], known: Mapping[str, Any]) -> Sample:
    tokens = as_tokens(fields["input_ids"], known["where"])
    labels = np.asarray(fields["labels"], np.int64)
    trained = labels != IGNORED
    if len(labels) != len(tokens) or not np.array_equal(labels[trained], tokens[trained]):
        raise ForeignFormat(f"{known['where']}: its labels are neither the token itself nor {IGNORED}")
    prompt = optional(fields, "prompt_ids", ())
    begins = 0 < len(prompt) <= len(tokens) and np.array_equal(tokens[: len(prompt)], prompt)
    length: dict[str, Any] = {"prompt_length": len(prompt)} if begins else {}
    return sequence_sample(tokens, trained, logprobs=optional(fields, "logprobs"), **length, **known)


def experts_in(fields: Mapping[str, Any], notes: list[str]) -> Any:
    """Return routed experts if the file has them; else add a note if it refers to them."""
    experts = value_of(optional(fields, "routed_experts"))
    if isinstance(experts, np.ndarray) or experts is None:
        return experts
    notes.append(EXPERTS)
    return None


def value_of(given: Any) -> Any:
    """Return the value in a SerializedRayObjectRef, None where it has none; others as they are."""
    return optional(given.state or {}, "value") if isinstance(given, Instance) else given
