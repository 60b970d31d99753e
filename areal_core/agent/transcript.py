"""The transcript of an episode: its row of data, and each call with its messages and its answer.

The tokens of a batch say what the model saw and sampled; the transcript says which tool returned
them and to which call. It is one line of JSON (`calls-*.jsonl` in recorder/FORMAT.md), and travels
as bytes in the first row of the episode: `calls_bytes` int32 [n], `calls_data` uint8 [bytes]. The
trainer takes it out of the batch once the observers have seen it.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from areal_core.agent.conversation import Call, Interaction, Message, Required
from areal_core.data.batch import Batch

BYTES = "base64"  # the only key of an object that stands for bytes in a row of data


def transcript(
    agent: str,
    arguments: Mapping[str, Any] | None,
    data: Mapping[str, Any],
    interactions: Sequence[Interaction],
    rewards: Mapping[str, float],
    failure: str | None,
) -> dict[str, Any]:
    """Return an episode as JSON types.

    Args:
        agent: its name or import path.
        arguments: of its constructor.
        data: the row; null where a value is of no JSON type and not bytes.
        interactions: the answered calls, in the order of their requests.
        rewards: by interaction id.
        failure: a member of `FAILURES`.
    """
    calls: list[dict[str, Any]] = []
    for number, interaction in enumerate(interactions):
        before = interactions[number - 1].call.tools if number else ()
        calls.append(call_facts(interaction, interactions[:number], before))
        calls[-1]["reward"] = rewards.get(interaction.id)
    constructed = {"name": agent, "arguments": as_json(arguments)}
    return {"agent": constructed, "data": as_json(data), "calls": calls, "failure": failure}


def call_facts(
    interaction: Interaction, earlier: Sequence[Interaction], tools_before: tuple[dict[str, Any], ...]
) -> dict[str, Any]:
    """Return a call: the messages that follow those of the call `after`, options, and the answer.

    `tools` is None where they are those of the call before.
    """
    call = interaction.call
    known = max(
        (one for one in earlier if begins_with(call, one)),
        key=lambda one: len(one.conversation),
        default=None,
    )
    num_known = 0 if known is None else len(known.conversation)
    facts = {
        "turn": interaction.turn,
        "after": None if known is None else known.turn,
        "messages": [message_facts(message) for message in call.messages[num_known:]],
        "options": options_of(call),
        "answer": message_facts(interaction.message),
        "finish": interaction.response.stop_reason,
    }
    return facts | {"tools": None if call.tools == tools_before else list(call.tools)}


def begins_with(call: Call, earlier: Interaction) -> bool:
    """Whether the messages of a call begin with an earlier call's, and its answer."""
    return call.messages[: len(earlier.conversation)] == earlier.conversation


def message_facts(message: Message) -> dict[str, Any]:
    """Return a message as templates get it, with its pictures, without random ids of tool calls."""
    facts = message.for_template()
    facts.pop("tool_call_id", None)
    # a template gets the place of a picture alone
    if pictures := [part for part in message.parts if isinstance(part, bytes)]:
        facts["images"] = pictures
    if message.tool_calls:
        calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
        facts |= {"tool_calls": calls}
    return facts


def options_of(call: Call) -> dict[str, Any]:
    """Return what a client set besides messages and tools."""
    required = {
        option.name: getattr(call.required, option.name)
        for option in fields(Required)
        if getattr(call.required, option.name) != getattr(Required(), option.name)
    }
    found = {
        "prompt": call.prompt,
        "n": call.n if call.n > 1 else None,
        "required": required,
        "sampling": dict(call.sampling),
        "template_kwargs": dict(call.template_kwargs),
    }
    return {name: value for name, value in found.items() if value}


def as_json(value: Any) -> Any:
    """Return a value as JSON types, bytes in base64; None if it has values of another type."""
    try:
        return json.loads(json.dumps(value, default=bytes_as_json, allow_nan=False))
    except (TypeError, ValueError):
        return None


def bytes_as_json(value: Any) -> dict[str, str]:
    """Return bytes as an object. Raises TypeError for other types."""
    if not isinstance(value, bytes):
        raise TypeError(type(value).__name__)
    return {BYTES: base64.b64encode(value).decode()}


def from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [from_json(member) for member in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {BYTES}:
        return base64.b64decode(value[BYTES])
    return {name: from_json(member) for name, member in value.items()}


def encode(facts: Mapping[str, Any]) -> bytes:
    """Return a transcript as a line of JSON; bytes in messages, such as pictures, as their hash."""

    def described(value: Any) -> Any:
        if isinstance(value, bytes):
            return {"sha256": hashlib.sha256(value).hexdigest()}
        return repr(value)

    return json.dumps(facts, ensure_ascii=False, default=described).encode(errors="replace")


def with_transcript(rows: Batch, line: bytes) -> Batch:
    sizes = torch.zeros(len(rows["input_ids"]), dtype=torch.int32)
    sizes[0] = len(line)
    data: Tensor = torch.frombuffer(bytearray(line), dtype=torch.uint8)
    return {**rows, "calls_bytes": sizes, "calls_data": data}


def without_transcripts(batch: Batch) -> Batch:
    return {key: tensor for key, tensor in batch.items() if key not in ("calls_bytes", "calls_data")}
