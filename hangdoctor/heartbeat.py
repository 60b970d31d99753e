"""Heartbeats: one small file per process, rewritten in place with the step and the time of the last
beat.

In any trainer, once a step:

    from hangdoctor.heartbeat import beat
    beat(step)

It does nothing unless the environment variable HANGDOCTOR_HEARTBEAT names a folder (`areal-debug
hang watch` sets it), so the line can stay. A beat is one `pwrite` of 48 bytes to an open file: a
few microseconds. Nothing is imported but `os` and `time`.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "HANGDOCTOR_HEARTBEAT"
WIDTH_BYTES = 48

_open_files: dict[tuple[int, str, str], int] = {}


@dataclass(frozen=True, slots=True)
class Beat:
    """The last beat of one process: finished steps, seconds of this machine's monotonic clock, and
    whether the process has reported that it is done.
    """

    name: str
    step: int
    time: float
    done: bool


def beat(step: int, name: str = "") -> None:
    """Report that `step` steps are finished.

    `name` is the name of the process in a collection; `rank_RANK` when empty.
    """
    _write(step, name, "beat")


def done(step: int, name: str = "") -> None:
    """Report that this process finished its work after `step` steps and will send no more beats."""
    _write(step, name, "done")


def withdraw(name: str = "") -> None:
    """Send no more beats of this process; whoever removes the file makes it count as ended."""
    if (key := _key(name)) in _open_files:
        os.close(_open_files.pop(key))


def observe(event: str, **facts: object) -> None:
    """Observer of the training loop: beats with the number of finished steps at every event of a
    run.
    """
    if event == "start":
        beat(0)
    elif event in ("batch", "micro_batch"):
        beat(_whole(facts["step"]))
    elif event in ("step", "weights"):
        beat(_whole(facts["step"]) + 1)
    elif event == "end":
        done(_whole(facts["steps"]))


def read_beats(folder: Path) -> dict[str, Beat]:
    beats = (_parse(path) for path in folder.glob("*.beat"))
    return {one.name: one for one in beats if one is not None}


def _parse(path: Path) -> Beat | None:
    """Return a beat, or None for a file that is still being created, or was withdrawn."""
    try:
        fields = path.read_text().split()
    except FileNotFoundError:
        return None
    if len(fields) != 3:
        return None
    return Beat(path.stem, int(fields[0]), float(fields[1]), fields[2] == "done")


def _write(step: int, name: str, word: str) -> None:
    key = _key(name)
    if not key[1]:
        return
    if key not in _open_files:
        os.makedirs(key[1], exist_ok=True)
        file = os.path.join(key[1], f"{key[2]}.beat")
        _open_files[key] = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
    text = f"{step} {time.monotonic():.3f} {word}"
    os.pwrite(_open_files[key], f"{text:<{WIDTH_BYTES - 1}}\n".encode(), 0)


def _key(name: str) -> tuple[int, str, str]:
    """Return process, folder and name: a forked child must not write into its parent's file."""
    return os.getpid(), os.environ.get(VARIABLE, ""), name or f"rank_{os.environ.get('RANK', '0')}"


def _whole(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError(f"a step must be an integer, got {value!r}")
    return value
