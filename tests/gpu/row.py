"""A row of the table, as one line of a group's output."""

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypedDict

MARK = "@row "
Verdict = Literal["pass", "fail", "not measurable"]


class Row(TypedDict):
    """What was checked, how it ended, and the numbers or the reason."""

    name: str
    verdict: Verdict
    what: str


def say(name: str, verdict: Verdict | bool, what: str) -> None:
    if isinstance(verdict, bool):
        verdict = "pass" if verdict else "fail"
    print(MARK + json.dumps(Row(name=name, verdict=verdict, what=what)), flush=True)


@contextmanager
def failing(name: str) -> Iterator[None]:
    """Make a failed row of any error of the body, with its place, and go on behind it."""
    try:
        yield
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = (str(error).strip().splitlines() or [""])[0]
        say(name, "fail", f"{type(error).__name__}: {reason[:200]} ({place.name}, line {place.lineno})")
