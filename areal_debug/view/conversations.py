"""The calls of agents for a page: each episode once, and which of its calls a row has."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from areal_core.safety.printable import printable, printable_block
from areal_debug.view.text import redact_text
from recorder.conversations import Conversation, conversations
from recorder.reader import RecordedStep

Patterns = Sequence[re.Pattern[str]]


def conversations_of(step: RecordedStep) -> list[Conversation | None] | None:
    """Return the calls of each row over all ranks; None if no row has any. Raises DamagedRecord."""
    ranks = range(step.manifest.num_ranks)
    rows = [row for rank in ranks for row in conversations(step, rank) or [None] * step.num_rows(rank)]
    return rows if any(rows) else None


def call_counts(rows: Sequence[Conversation | None] | None) -> dict[str, np.ndarray]:
    """Return the columns of the page's table: calls, and tool calls that failed, uint32 [rows]."""
    if rows is None:
        return {}
    return {
        "calls": np.array([0 if row is None else len(row.calls) for row in rows], np.uint32),
        "failed": np.array([0 if row is None else row.num_failed for row in rows], np.uint32),
    }


def calls_document(step: RecordedStep, patterns: Patterns) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []
    places: dict[tuple[int, int, int], int] = {}
    rows: list[dict[str, Any] | None] = []
    for row in conversations_of(step) or ():
        if row is None:
            rows.append(None)
            continue
        one = row.transcript
        for call in row.calls:
            name = (one.prompt_id, one.episode, call.turn)
            if name not in places:
                places[name] = len(calls)
                parts = [shown(asdict(part), patterns) for part in row.parts(call)]
                facts = {"turn": call.turn, "after": call.after, "finish": printable(call.finish)}
                calls.append(facts | {"reward": call.reward, "parts": parts})
        rows.append(
            {
                "agent": printable(redact_text(one.agent.name, patterns)),
                "failure": one.failure and printable(one.failure),
                "calls": [places[one.prompt_id, one.episode, call.turn] for call in row.calls],
            }
        )
    return {"rows": rows, "calls": calls}


def shown(part: dict[str, Any], patterns: Patterns) -> dict[str, Any]:
    """Return a part of a call without what the patterns match."""
    texts = {name: printable_block(redact_text(part[name], patterns)) for name in ("name", "text")}
    return part | texts
