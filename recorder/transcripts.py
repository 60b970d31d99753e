"""The calls of an episode of an agent: messages, tool calls and their results."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any

from recorder.documents import parse_as, parse_document
from recorder.errors import DamagedRecord
from recorder.tensors import as_array

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


# How the text of a failure begins: that of an exception, of a framework, of a shell.
FAILURE = re.compile(
    r"\W{0,3}(?:"
    r"error(?:\s*(?:[]>:!\n-]|$)|\s+(?:code|calling|during|executing|in tool|invoking|parsing|running|while)\b)"
    r"|(?:[a-z_]\w*\.)*[a-z_]\w*(?:error|exception)\b\s*(?:[:(]|$)"
    r"|exception(?:\s*:|\s+(?:in|occurred|raised|while)\b)"
    r"|traceback \(most recent call last\)"
    r"|an? (?:\w+ ){0,2}(?:error|exception) (?:has )?(?:occurred|happened|was raised|while)\b"
    r"|fail(?:ed|ure)\b(?:\s*:|\s+to\b)"
    r"|(?:command|execution|function|request|tool)\b[^\n]{0,80}\b"
    r"(?:failed|timed out|does not exist|is not available|not found|raised)\b"
    r"|(?:invalid|unknown|no such) (?:arguments?|function|input|json|parameters?|tool)\b"
    r"|exit(?:ed)?(?: with)?(?: code| status)?\s*[:=]?\s*-?[1-9])",
    re.IGNORECASE,
)


CODES = ("exit_code", "exitCode", "returncode", "return_code")


FAILED = ("error", "failed", "failure")


@dataclass(frozen=True)
class ToolUse:
    """A tool call of the model.

    `turn` is the call whose answer asked for it. `result` is None if no later call has it, and then
    `failed` is None, too.
    """

    turn: int
    name: str
    arguments: str
    result: str | None
    failed: bool | None


def tool_uses(calls: Iterable[RecordedCall]) -> list[ToolUse]:
    """Return the tool calls in the order of the calls, each with the first result among them."""
    calls = list(calls)
    results: dict[int, list[str]] = {}
    for call in calls:
        given = takewhile(lambda message: message["role"] == "tool", call.messages)
        if call.after is not None and (texts := [text_of(message) for message in given]):
            results.setdefault(call.after, texts)
    found = []
    for call in calls:
        texts = results.get(call.turn, [])
        for number, asked in enumerate(call.answer.get("tool_calls", ())):
            result = texts[number] if number < len(texts) else None
            failed = None if result is None else is_failure(result)
            found.append(ToolUse(call.turn, asked["name"], asked["arguments"], result, failed))
    return found


def text_of(message: Mapping[str, Any]) -> str:
    """Return the content of a message as text; a picture is `[image]`."""
    content = message.get("content")
    if not isinstance(content, list):
        return content or ""
    return "".join(part.get("text", f"[{part.get('type')}]") for part in content)


def is_failure(result: str) -> bool:
    """Return whether a tool's result says that it failed: as a JSON object, or as it begins."""
    begin = result.lstrip()
    if begin.startswith("{"):
        try:
            document = json.loads(begin)
        except (ValueError, RecursionError):
            return False
        return says_failure(document)
    return FAILURE.match(begin) is not None


def says_failure(document: Mapping[str, Any]) -> bool:
    """Return whether an object has an error, a status of one, or an exit code other than 0."""
    return (
        bool(document.get("error"))
        or any(document.get(name) is True for name in ("is_error", "isError"))
        or any(document.get(name) is False for name in ("ok", "success"))
        or document.get("status") in FAILED
        or any(document.get(name) not in (None, 0) for name in CODES)
    )
