"""The phase of a training step that a stack shows, from its frames, source lines and /proc state.

The innermost frame with a `step` in frames.toml decides, except that some phases are only the means
of an outer one: a forward pass inside a backward is recomputation, an HTTP request inside a dataset
loads data. C calls have no frame, so the text of the innermost source line is read, too.
"""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hangdoctor.collect.process import ProcState
from hangdoctor.frames import LIBRARIES, is_library, main_thread, normal, show
from hangdoctor.model import Frame, Thread
from hangdoctor.tables import SOURCE_STEPS, STEPS, first, phases_of, specific_wait

WAITING = ("collective", "device")
"""Phases that end when other ranks arrive: a rank in one of them is not the one that is late. On a
GPU, waiting for the device is mostly waiting for a collective that is queued on it."""
OTHER = "other"
STARTUP = "startup"
"""Imports, process groups that are made, models that are built: before the first step."""
CAUSES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
# Phases of `tables.phases_of` and kinds of waits, in our terms; phase to those that it may serve.
SAME, KINDS, MEANS, MAY_COLLECT = (CAUSES.pop(name) for name in ("same", "kinds", "means", "may_collect"))
PHASE_NAMES = {cause: row["name"] for cause, row in CAUSES.items() if row.get("is_phase", True)}
REQUEST = "http"
"""A request to some server: the calls around it decide for what, by default for a rollout."""
IMPORTER = "<frozen importlib"
MOST_FAULTS = 50
"""Major page faults between two rounds: more is a rank that waits for its memory."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What a process did at one moment.

    `place` is the innermost call of the user's program, `busy` is True if the main thread ran or
    was runnable, `gil_held_at` is the place of another thread that held the GIL meanwhile.
    """

    phase: str
    place: str
    busy: bool
    gil_held_at: str = ""

    @property
    def waits(self) -> bool:
        """True if other ranks must arrive."""
        return self.phase in WAITING


Source = Callable[[str, int], str]
"""Returns the text of a line of a file, or an empty string."""


def activity_of(threads: tuple[Thread, ...], proc: ProcState, faults: int, source: Source) -> Activity:
    """Return what a process does.

    Args:
        threads: its stacks.
        proc: its state at the same time.
        faults: major page faults since the last round.
        source: reads a source line.
    """
    main = main_thread(threads)
    if main is None:
        return Activity("stopped" if proc.state in "Tt" else OTHER, "", False)
    place = place_of(main.frames)
    busy = proc.state in "RD"
    if proc.state in "Tt":
        return Activity("stopped", place, False)
    found = phase_of(main.frames, source, proc.has_gpu)
    if found == "backward" and waits_in_backward(main.frames, proc):
        found = "collective"
    if found == OTHER and not busy:
        found, place = of_other_threads(threads, main, source) or (found, place)
    if faults >= MOST_FAULTS and found not in (*WAITING, "input"):
        found = "swap"
    holder = next((t for t in threads if t.holds_gil and t is not main and t.frames), None)
    return Activity(found, place, busy, place_of(holder.frames) if holder and found not in WAITING else "")


def place_of(frames: tuple[Frame, ...]) -> str:
    """Return the innermost call of the user's program, else the innermost call."""
    plain = [frame for f in frames if not (frame := normal(f)).native]
    users = [frame for frame in plain if not is_library(frame.file)]
    return show((users or plain)[0]) if plain else ""


def phase_of(frames: tuple[Frame, ...], source: Source, has_gpu: bool = False) -> str:
    python = [frame for frame in frames if not frame.native]
    if not python:
        return OTHER
    if imports_library(python):
        return STARTUP
    text = source(python[0].file, python[0].line)
    named = next((row.value for row in SOURCE_STEPS if row.function.search(text)), None)
    around = [phase for frame in python if (phase := phase_of_frame(normal(frame)))]
    phases = [named, *around] if named and (has_gpu or named != "device") else around
    if not phases:
        return OTHER
    innermost = phases[0]
    outer = next((phase for phase in phases[1:] if phase in MEANS.get(innermost, ())), None)
    return outer or ("rollout" if innermost == REQUEST else innermost)


@lru_cache(maxsize=65536)
def phase_of_frame(frame: Frame) -> str | None:
    wait = specific_wait(frame.function, frame.file)
    if wait and KINDS.get(wait[0]) == "collective":
        return "collective"
    if step := first(STEPS, frame.function, frame.file):
        return step[0]
    if wait and wait[0] in KINDS:
        return KINDS[wait[0]]
    return next((SAME[phase] for phase in SAME if phase in phases_of(frame.function, frame.file)), None)


def imports_library(frames: Sequence[Frame]) -> bool:
    importer = next((i for i, f in enumerate(frames) if f.file.startswith(IMPORTER)), None)
    if importer is None:
        return False
    module = next((f for f in reversed(frames[:importer]) if f.function == "<module>"), None)
    return module is None or is_library(normal(module).file)


def waits_in_backward(frames: tuple[Frame, ...], proc: ProcState) -> bool:
    """True if autograd sleeps in C++: its kernels run on the CPU, so it waits for the reduction.

    A hook or a custom function would show Python frames inside it, and a device thread would run.
    """
    innermost = next(normal(frame) for frame in frames if not frame.native)
    return (
        innermost.function in ("_engine_run_backward", "backward", "_run_backward")
        and innermost.file.startswith(LIBRARIES)
        and proc.state == "S"
        and not proc.autograd_runs
    )


def of_other_threads(threads: tuple[Thread, ...], main: Thread, source: Source) -> tuple[str, str] | None:
    """Return phase and place of a thread that the main thread waits for: the first in a known
    phase.
    """
    for thread in threads:
        if thread is not main and thread.frames:
            phase = phase_of(thread.frames, source)
            if phase not in (OTHER, *WAITING):
                return phase, place_of(thread.frames)
    return None
