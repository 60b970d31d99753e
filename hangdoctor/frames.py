"""Normalise frames to the same text on every machine.

Qualified names are cut to their last component, paths to what is below site-packages: py-spy 0.4.3
prints `Condition.wait`, older ones `wait`; one host has
`/opt/venv/lib/python3.11/site-packages/torch/..`, another `torch/..`. Ranks are compared, and rules
are matched, on the remaining text: last component of the name, end of the path, line.
"""

import gc
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from hangdoctor.model import Frame, Thread

LIBRARY_ROOT = re.compile(
    r"^.*/(?:site-packages|dist-packages)/|^.*/lib(?:64)?/python3\.\d+/|^(?:lib(?:64)?/)?python3\.\d+/"
)
TABLES = tomllib.loads(Path(__file__).with_name("frames.toml").read_text(encoding="utf-8"))
WRAPPERS = {(name, file) for file, names in TABLES["wrappers"].items() for name in names}
# Standard library files are recognised by name where the dump has cut the path down to it.
STANDARD = frozenset(TABLES["libraries"]["standard_files"])
STANDARD_FOLDERS = tuple(TABLES["libraries"]["standard_folders"])
LIBRARIES = tuple(TABLES["libraries"]["folders"])
LAUNCHER_FILE = re.compile(
    r"(?:^|/)(?:torch/distributed/(?:run|launcher/api)|accelerate/commands/launch|deepspeed/launcher/\w+|bin/(?:torchrun|accelerate|deepspeed))"
    r"(?:\.py)?$|torch/distributed/elastic/agent/|(?:^|/)data_parallel_controller\.py$"
)


def of_launcher(frame: Frame) -> bool:
    """True for a call that only a process which starts ranks makes."""
    spawns = frame.function in ("start_processes", "join") and frame.file.endswith(
        "torch/multiprocessing/spawn.py"
    )
    return spawns or LAUNCHER_FILE.search(frame.file) is not None


# Where the main thread of a process begins.
ENTRIES = {"<module>", "_run_module_as_main", "spawn_main"}


@lru_cache(maxsize=65536)
def last_name(function: str) -> str:
    """Map `DistributedDataParallel.forward` to `forward`, `deco.<locals>.wrapper` to `wrapper`;
    `<lambda>` stays.
    """
    return function.rsplit(".", 1)[-1] if "." in function and "::" not in function else function


@lru_cache(maxsize=65536)
def short_file(file: str) -> str:
    """Return a path from below site-packages or the standard library, else its last three
    components.
    """
    plain = file.replace("\\", "/")
    cut = LIBRARY_ROOT.sub("", LIBRARY_ROOT.sub("", plain))
    if cut != plain:
        return cut
    parts = plain.split("/")
    for library in LIBRARIES:  # run from a source checkout
        name = library.rstrip("/")
        if library.endswith("/") and name in parts[:-1] and len(parts) > 3:
            return "/".join(parts[parts.index(name) :])
    return "/".join(parts[-3:])


@lru_cache(maxsize=65536)
def is_library(file: str) -> bool:
    """True if a short path belongs to a library rather than to the user's program."""
    return (
        file in STANDARD
        or file.startswith(STANDARD_FOLDERS)
        or file.startswith(LIBRARIES)
        or file.startswith(("<frozen", "<string>"))
    )


@lru_cache(maxsize=65536)
def normal(frame: Frame) -> Frame:
    """Return a frame with short name and path; native frames keep their name without arguments.

    A name in angle brackets (`<string>`) is no shared object, whatever the dump took it for.
    """
    name = frame.file.rsplit("/", 1)[-1]
    if frame.native and not name.startswith("<"):
        return Frame(frame.function, name, 0, True)
    return Frame(last_name(frame.function), short_file(frame.file), frame.line)


@lru_cache(maxsize=65536)
def normal_frames(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return a stack without wrappers, innermost first."""
    short = (normal(frame) for frame in frames)
    return tuple(frame for frame in short if (frame.function, frame.file) not in WRAPPERS)


def python_only(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    return tuple(frame for frame in frames if not frame.native)


def user_frames(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the calls of the user's own program, innermost first: the call path to the wait."""
    return tuple(frame for frame in frames if not frame.native and not is_library(frame.file))


def location_of(frame: Frame | None) -> str:
    """Return `file:line`, or the file where the line is unknown, as in excerpts."""
    if frame is None:
        return ""
    return f"{frame.file}:{frame.line}" if frame.line else frame.file


def show(frame: Frame) -> str:
    """Return a frame as `function (file:line)`."""
    location = location_of(frame)
    return f"{frame.function} ({location})" if location else frame.function


def main_thread(threads: tuple[Thread, ...]) -> Thread | None:
    """Return the main thread: by name, else by frames that only it has, else the only one; never by
    its position in the dump.
    """
    candidates = [t for t in threads if t.frames]
    entered = [t for t in candidates if {frame.function for frame in t.frames[-4:]} & ENTRIES]
    # A dump may give the name to the thread with the lowest id, although `threading` started it.
    named = [t for t in candidates if t.name == "MainThread" and not (entered and of_threading(t))]
    started = [t for t in candidates if not of_threading(t)]
    found = named[:1] or entered[:1] or started[-1:] or candidates[:1]
    return found[0] if found else None


def of_threading(thread: Thread) -> bool:
    """True for a thread that `threading` started: its bootstrap is the outermost frame, as that of
    multiprocessing is in a forked child's main thread.
    """
    frame = thread.frames[-1]
    return (
        last_name(frame.function) in ("_bootstrap", "_bootstrap_inner") and "multiprocess" not in frame.file
    )


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Free by reference counts only; usable as a decorator too."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
