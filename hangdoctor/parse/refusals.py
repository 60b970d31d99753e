"""Classify the message of a py-spy that failed: its exit status is 1 for every cause, so the cause
is in the text.
"""

import re

from hangdoctor.model import Status

# Messages of py-spy 0.4.2 and 0.4.3; `Failed to suspend` follows a process header without threads.
STATUS_PATTERNS: tuple[tuple[Status, str], ...] = (
    (
        "not_permitted",
        r"permission denied|operation not permitted|\bEPERM\b|os error (?:1|13)\b|elevated permissions",
    ),
    ("stopped", r"failed to suspend process"),
    (
        "not_python",
        r"failed to find python version|unsupported version of python|failed to find a python interpreter",
    ),
    (
        "gone",
        r"failed to get process executable name|no such process|os error 3\b|check that the process is running",
    ),
    ("timed_out", r"timed? ?out|signal: killed"),
)
MAX_REFUSAL_BYTES = 20_000


def refusal_in(text: str) -> tuple[Status, str] | None:
    """Return (status, first line) of an error message of py-spy, or None where a text is none."""
    if len(text) > MAX_REFUSAL_BYTES or not re.search(
        r"\b(?:Error|Permission Denied|Failed|timed? ?out)\b", text, re.IGNORECASE
    ):
        return None
    line = next((line.strip() for line in text.split("\n") if line.strip()), "")
    status = next(
        (status for status, pattern in STATUS_PATTERNS if re.search(pattern, text, re.IGNORECASE)), None
    )
    return (status, line[:300]) if status else None
