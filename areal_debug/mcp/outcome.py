"""What came of a verb that was called with --json, from its exit code and what it printed."""

import json
from dataclasses import dataclass
from typing import Any

ERROR = "Error: "  # before the sentence that ends a verb, on standard error


@dataclass(frozen=True)
class Outcome:
    """What came of a call: its exit code, and its report or the sentence that ended it."""

    exit_code: int
    report: Any = None
    error: str | None = None


def printed_outcome(code: int, printed: str, errors: str) -> Outcome:
    """Return the report in what a verb printed, else the sentence that ended it."""
    try:
        return Outcome(code, report=json.loads(printed))
    except ValueError:
        sentence = errors.rpartition(ERROR)[2].strip()
        return Outcome(code or 2, error=sentence or f"it ended with exit code {code} and no report")
