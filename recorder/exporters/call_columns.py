"""The columns of agents' calls: of each row, those of its conversation.

Messages have the form of OpenAI's API, which chat templates and trainers read.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recorder.agents.conversations import Conversation, conversations
from recorder.agents.tools import text_of
from recorder.reader import RecordedStep

MESSAGE = np.dtype([(name, "O") for name in ("role", "content", "reasoning_content", "name", "tool_calls")])
NAMES = np.dtype("O")  # texts, a list a row
# name -> dtype (None for text), and whether it is a list
CALL_COLUMNS: dict[str, tuple[np.dtype[Any] | None, bool]] = {
    "num_calls": (np.dtype("i4"), False),
    "num_tool_calls": (np.dtype("i4"), False),
    "num_failed_tool_calls": (np.dtype("i4"), False),
    "tools_used": (NAMES, True),
    "messages": (MESSAGE, True),
    "tools": (None, False),
}
Values = tuple[Any, np.ndarray | None, np.ndarray]  # values, offsets, known rows


def columns_of_calls(step: RecordedStep, rank: int) -> dict[str, Values] | None:
    """Return the columns of a rank's rows: values, offsets of lists, and the rows that have calls.

    None if the calls of agents were not recorded. Raises DamagedRecord.
    """
    rows = conversations(step, rank)
    if rows is None:
        return None
    known = np.array([row is not None for row in rows])
    uses = [[] if row is None else row.tool_uses for row in rows]
    used = [list(dict.fromkeys(use.name for use in of_row)) for of_row in uses]
    messages = [[] if row is None else [message_of(message) for message in row.messages] for row in rows]
    numbers = {
        "num_calls": [0 if row is None else len(row.calls) for row in rows],
        "num_tool_calls": [len(of_row) for of_row in uses],
        "num_failed_tool_calls": [0 if row is None else row.num_failed for row in rows],
    }
    return {
        **{name: (np.array(values, np.int32), None, known) for name, values in numbers.items()},
        "tools_used": (*joined(used, NAMES), known),
        "messages": (*joined(messages, MESSAGE), known),
        "tools": ([tools_text(row) for row in rows], None, known),
    }


def joined(rows: Sequence[Sequence[Any]], dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the items of all rows one after another, and where each row begins and ends."""
    items = [item for row in rows for item in row]
    values = np.empty(len(items), dtype)
    values[:] = items
    return values, np.append(0, np.cumsum([len(row) for row in rows], dtype=np.int64))


def message_of(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a recorded message as the members of MESSAGE."""
    asked = [
        {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in message.get("tool_calls", ())
    ]
    texts = (optional_text(message, name) for name in ("reasoning_content", "name"))
    return message["role"], text_of(message), *texts, asked or None


def optional_text(message: Mapping[str, Any], name: str) -> str | None:
    value = message.get(name)
    return value if isinstance(value, str) else None


def tools_text(row: Conversation | None) -> str | None:
    return None if row is None else json.dumps(row.offered, ensure_ascii=False)
