"""A reader that fails in every way, to test the guard."""

import os
import time
from pathlib import Path

from .inputs import Case
from .targets import Target


class Refused(ValueError):
    """An error as our packages define it."""


Refused.__module__ = "recorder.errors"


def run(case: Case, box: Path) -> None:
    name = case.files.get("name", b"").decode()
    if "raise" in name:
        raise KeyError("broken")
    if "sleep" in name:
        time.sleep(60)
    if "allocate" in name:
        len(b"x" * (1100 << 20))
    if "exit" in name:
        os._exit(3)
    if "refuse" in name:
        raise Refused("wrong input")


TARGETS = {"broken": Target(lambda folder: {"valid": {"name": b"fine", "other": b"1"}}, run, (Refused,))}
