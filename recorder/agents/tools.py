"""The tool calls of an agent with their results, and which of them failed.

A request has no field that says that a tool failed: frameworks show the model a text. `is_failure`
knows how they begin.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from recorder.agents.calls import RecordedCall

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
