"""Classify what a stack waits for: tables map (function, file) to a kind of wait and to a phase of
the job.

A wait is *specific* (a collective, a data loader, an HTTP client: it names what must happen) or
*generic* (a lock, a queue, a socket, a sleep: it only shows how). The innermost specific wait
decides; a generic one counts where nothing around it is specific. Phases (cleanup, init,
checkpoint, data, error) are read from the complete stack.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from hangdoctor.frames import is_library, normal_frames, python_only, user_frames
from hangdoctor.model import Frame
from hangdoctor.native import NATIVE
from hangdoctor.patterns import (
    COLLECTIVE_FILES,
    COLLECTIVES,
    GENERIC,
    P2P,
    PEER_KINDS,
    SPECIFIC,
    WORKER_LOOP,
    Pattern,
)
from hangdoctor.phases import DOMAINS, PHASES

# These call the program back: the code of a module waits, not the import around it.
AROUND = ("import", "load", "compile")


@dataclass(frozen=True, slots=True)
class Stance:
    """The wait of one thread.

    `frame` shows the wait, `chain` is the user's call path to it, innermost first. `operation` is
    the outermost name of a collective, as the user called it; `domain` is the parallel dimension
    whose library calls it, or an empty string.
    """

    kind: str
    operation: str
    frame: Frame | None
    chain: tuple[Frame, ...]
    phases: frozenset[str] = frozenset()
    domain: str = ""
    frames: tuple[Frame, ...] = ()

    @property
    def waits_for_peers(self) -> bool:
        """True if the wait ends only when other ranks arrive."""
        return self.kind in PEER_KINDS


@lru_cache(maxsize=65536)
def specific_wait(function: str, file: str) -> tuple[str, str] | None:
    """Return (kind, operation) where this frame alone identifies the wait."""
    if file.endswith(COLLECTIVE_FILES):
        name = function.lstrip("_")
        if function in COLLECTIVES or name in COLLECTIVES:
            return "collective", function
        if function in P2P:
            return "p2p", function
    return first_match(SPECIFIC, function, file)


@lru_cache(maxsize=65536)
def generic_wait(function: str, file: str) -> tuple[str, str] | None:
    """Return (kind, operation) of a frame that shows how it waits but not for what."""
    return first_match(GENERIC, function, file)


@lru_cache(maxsize=65536)
def native_wait(function: str) -> tuple[str, str] | None:
    """Return (kind, operation) of a native frame, by its function name."""
    return first_match(NATIVE, function[:300], "")


def first_match(table: tuple[Pattern, ...], function: str, file: str) -> tuple[str, str] | None:
    """Return (kind, operation) of the first row that matches in full."""
    for row in table:
        if compiled(row.function).fullmatch(function) and compiled(row.file).fullmatch(file):
            return row.kind, row.operation
    return None


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern, cached."""
    return re.compile(pattern)


@lru_cache(maxsize=65536)
def phases_of(function: str, file: str) -> frozenset[str]:
    """Return the phases of the job that one frame indicates. `USER` in a table means: not in a
    library.
    """
    place = "USER" if not is_library(file) else file
    return frozenset(
        phase
        for phase, names, files in PHASES
        if compiled(names).fullmatch(function)
        and (compiled(files).fullmatch(place) or compiled(files).fullmatch(file))
    )


@lru_cache(maxsize=65536)
def domain_of(file: str) -> str:
    """Return the parallel dimension that a library file belongs to, or an empty string."""
    return next((name for name, pattern in DOMAINS if compiled(pattern).fullmatch(file)), "")


@lru_cache(maxsize=65536)
def stance_of(raw: tuple[Frame, ...]) -> Stance:
    """Classify a stack from its frames alone."""
    frames = normal_frames(raw)
    python = python_only(frames)
    phases = frozenset(phase for f in python for phase in phases_of(f.function, f.file))
    domain = next((name for f in python if (name := domain_of(f.file))), "")
    kind, operation, frame = wait_of(frames, python)
    return Stance(kind, operation, frame, user_frames(frames), phases, domain, frames)


def wait_of(frames: tuple[Frame, ...], python: tuple[Frame, ...]) -> tuple[str, str, Frame | None]:
    """Return the innermost specific wait, else the outermost generic one, else that of the native
    frames, else running.
    """
    found = [
        (wait, f)
        for f in python
        if (wait := specific_wait(f.function, f.file))
        and not (wait[0] in AROUND and calls_program(python, f))
        and not (wait[1] == WORKER_LOOP and f is not python[0])
    ]
    native = [(wait, f) for f in frames if f.native and (wait := native_wait(f.function))]
    if found:
        (kind, operation), frame = found[0]
        if kind in ("import", "load", "compile") and native and native[0][0][0] != "lock":
            return native[0][0][0], native[0][0][1], python[0] if python else frame
        if kind in ("collective", "p2p"):
            # The user called the outermost collective: all_gather_object, not its all_gather.
            outer = [(w, f) for w, f in found if w[0] == kind and f.file == frame.file]
            (kind, operation), frame = outer[-1]
        return kind, operation, frame
    generic = [(wait, f) for f in python if (wait := generic_wait(f.function, f.file))]
    if generic and not calls_program(python, generic[0][1]):
        (kind, operation), frame = outermost_of_run(python, generic[0][1])
        if kind in ("backward", "device") and native and native[0][0][0] == "collective":
            (kind, operation) = native[0][0]
        return kind, operation, frame
    if native:
        (kind, operation), _ = native[0]
        return kind, operation, python[0] if python else native[0][1]
    return "running", "", python[0] if python else (frames[0] if frames else None)


def outermost_of_run(python: tuple[Frame, ...], first: Frame) -> tuple[tuple[str, str], Frame]:
    """Return the last of the generic waits that call each other: `Condition.wait` under
    `Future.result` is a future.
    """
    found = (generic_wait(first.function, first.file) or ("blocked", ""), first)
    for frame in python[python.index(first) :]:
        wait = generic_wait(frame.function, frame.file)
        if wait is None or wait[0] in ("backward", "device"):
            break
        found = (wait, frame)
    return found


def calls_program(python: tuple[Frame, ...], frame: Frame) -> bool:
    """True if user code runs *inside* the generic frame: `Thread.run` calling the program is no
    wait of threading.
    """
    inner = python[: python.index(frame)]
    return any(not is_library(f.file) for f in inner)
