"""The transcripts of agents' episodes: a line of JSON each, `calls-*.jsonl` in FORMAT.md.

They arrive in the batch as bytes of the first row of each episode: `calls_bytes` [B], how many
bytes each row has, and `calls_data` [bytes].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from recorder.checksum_json import parse_document
from recorder.errors import DamagedRecord
from recorder.tensors import as_array
from recorder.typed_json import parse_as

KEYS = ("calls_bytes", "calls_data")


@dataclass(frozen=True)
class Constructed:
    """An agent: its name or import path, and its constructor's arguments, null if not JSON."""

    name: str
    arguments: Any


@dataclass(frozen=True)
class RecordedCall:
    """A call of the model; `messages` follow those of the call `after` and its answer.

    `tools` is null where they are those of the call before.
    """

    turn: int
    after: int | None
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None
    options: dict[str, Any]
    answer: dict[str, Any]
    finish: str
    reward: float | None


@dataclass(frozen=True)
class Transcript:
    """An episode; `data`, the row of the dataset, is null where it is not JSON."""

    prompt_id: int
    episode: int
    agent: Constructed
    data: Any
    calls: tuple[RecordedCall, ...]
    failure: str | None


def without_calls(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a batch that its safetensors file has."""
    return {key: value for key, value in batch.items() if key not in KEYS}


def call_lines(batch: Mapping[str, Any]) -> bytes | None:
    """Return the lines of the episodes of a batch; None without an agent."""
    if KEYS[0] not in batch:
        return None
    sizes, data, prompts, episodes = (
        as_array(batch[key])[1] for key in ("calls_bytes", "calls_data", "prompt_id", "episode")
    )
    ends = accumulate(sizes.tolist())
    lines = [
        b'{"prompt_id": %d, "episode": %d, %s\n' % (prompt, episode, data[end - size + 1 : end].tobytes())
        for prompt, episode, size, end in zip(prompts, episodes, sizes.tolist(), ends, strict=True)
        if size
    ]
    return b"".join(lines)


def parse_transcripts(data: bytes, file: str) -> list[Transcript]:
    """Parse `calls-*.jsonl`. Raises DamagedRecord."""
    found = [parse_as(Transcript, parse_document(line, file), file) for line in data.split(b"\n")[:-1]]
    names = {(episode.prompt_id, episode.episode) for episode in found}
    if len(names) < len(found):
        raise DamagedRecord(file, "has an episode twice")
    for episode in found:
        check_calls(file, episode)
    return found


def check_calls(file: str, episode: Transcript) -> None:
    """Raise DamagedRecord unless calls follow earlier ones, with messages as FORMAT.md says."""
    turns: set[int] = set()
    for call in episode.calls:
        where = f"call {call.turn} of episode {episode.episode} of prompt {episode.prompt_id}"
        if call.turn in turns or (call.after is not None and call.after not in turns):
            raise DamagedRecord(file, f"has {where} twice, or before the call that it follows")
        turns.add(call.turn)
        for message in (*call.messages, call.answer):
            if not is_message(message):
                raise DamagedRecord(file, f"has no message of a role, with text or parts, in {where}")


def is_message(message: Mapping[str, Any]) -> bool:
    """Return whether a message has a role, text or a list of parts, and tool calls with a name."""
    content, calls = message.get("content"), message.get("tool_calls", [])
    parts = content if isinstance(content, list) else []
    return (
        isinstance(message.get("role"), str)
        and isinstance(content, str | list | None)
        and all(isinstance(part, dict) and isinstance(part.get("text", ""), str) for part in parts)
        and isinstance(calls, list)
        and all(isinstance(call, dict) for call in calls)
        and all(isinstance(call.get(name), str) for call in calls for name in ("name", "arguments"))
    )
