"""What a thread, and a process, waits for: its frames by the rows of `frames.toml`.

The innermost specific wait decides; a generic one counts where nothing around it is specific.
Phases are read from the complete stack. Python frames end where C begins: a native pass shows the C
calls; where there is none, the source line names the call, and `/proc/PID/wchan` the function of
the kernel. The wait of a process is that of its main thread, unless it only waits for another one.
"""

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache

from hangdoctor.frames import TABLES, is_library, main_thread, normal_frames, python_only, user_frames
from hangdoctor.model import Frame, ProcessDump, ProcessFacts, Thread
from hangdoctor.tables import (
    ENGINE_LOOP,
    KERNEL,
    NATIVE_EXIT,
    PEER_KINDS,
    SOURCE_WAITS,
    WORKER_LOOP,
    domain_of,
    first,
    generic_wait,
    native_wait,
    phases_of,
    specific_wait,
)

POSTED = re.compile(
    r"\b(i?recv|i?send|batch_isend_irecv)\b|\b(all_reduce|all_gather\w*|reduce_scatter\w*|broadcast|all_to_all\w*|barrier)\b"
)
# These call the program back: the code of a module waits, not the import around it.
AROUND = ("import", "load", "compile", "launcher")


@dataclass(frozen=True, slots=True)
class Wait:
    """The wait of one thread.

    `frame` shows the wait, `chain` is the user's call path to it, innermost first. `operation` is
    the outermost name of a collective, as the user called it; `domain` is the parallel dimension
    whose library calls it, or an empty string. `python` are the Python frames of `frames`.
    """

    kind: str
    operation: str
    frame: Frame | None
    chain: tuple[Frame, ...]
    phases: frozenset[str] = frozenset()
    domain: str = ""
    frames: tuple[Frame, ...] = ()
    python: tuple[Frame, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "python", python_only(self.frames))

    @property
    def waits_for_peers(self) -> bool:
        """True if the wait ends only when other ranks arrive."""
        return self.kind in PEER_KINDS


@lru_cache(maxsize=65536)
def wait_of(raw: tuple[Frame, ...]) -> Wait:
    """Classify a stack from its frames alone."""
    frames = normal_frames(raw)
    python = python_only(frames)
    phases = frozenset(phase for f in python for phase in phases_of(f.function, f.file))
    if any(f.native and NATIVE_EXIT.fullmatch(f.function) for f in frames):
        phases |= {"cleanup"}
    domain = next((name for f in python if (name := domain_of(f.file))), "")
    kind, operation, frame = wait_in_frames(frames, python)
    if kind == "data":
        phases -= {"cleanup"}  # a loader ends its workers at the end of an epoch
    if kind == "destroy":
        phases |= {"cleanup"}
    return Wait(kind, operation, frame, user_frames(frames), phases, domain, frames)


@lru_cache(maxsize=65536)
def context(frames: tuple[Frame, ...], phases: frozenset[str]) -> str:
    """Return the outermost of `phases` on a stack, or an empty string: a save that closes its
    writer is a save, a clean-up that saves is a clean-up.
    """
    for frame in reversed(python_only(frames)):
        if found := phases_of(frame.function, frame.file) & phases:
            return min(found)
    return ""


def wait_in_frames(frames: tuple[Frame, ...], python: tuple[Frame, ...]) -> tuple[str, str, Frame | None]:
    """Return the innermost specific wait, else the outermost generic one, else that of the native
    frames, else running.
    """
    # A loader's worker runs the program: what that waits for is the wait of the worker.
    in_worker = any(f.function == "_worker_loop" for f in python)
    found = [
        (wait, f)
        for f in python
        if (wait := specific_wait(f.function, f.file))
        and not (wait[0] in AROUND and calls_program(python, f))
        and not (wait[1] == WORKER_LOOP and f is not python[0])
        and not (wait[0] == "data" and in_worker and calls_program(python, f))
    ]
    native = [(wait, f) for f in frames if f.native and (wait := native_wait(f.function))]
    if len(found) > 1 and found[0][0][1] == "workers" and found[1][0][0] == "data":
        found = found[1:]  # the loop over the data ends its loader
    if found:
        (kind, operation), frame = found[0]
        if kind == "collective" and any(wait[0] == "store" for wait, _ in native):
            return "store", "communicator", frame
        if operation == "shm_broadcast":
            callers = (f.function for f in python[python.index(frame) :] if f.file != frame.file)
            if next(callers, "") == "worker_busy_loop":
                return "idle", ENGINE_LOOP, frame
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
        # Below a call of the store or of a collective C waits for a socket or a lock, below an abort for the device.
        outer = [n for kinds in (("destroy",), PEER_KINDS) for n in native if n[0][0] in kinds]
        (kind, operation), _ = (outer or native)[0]
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


UNNAMED = "unnamed thread"
# A main thread that waits for another thread of its process: that thread shows the real wait.
DELEGATING = ("future", "event", "queue", "join", "idle", "lock")
# Threads that look after the process do not show what it waits for.
WATCHES = re.compile(r"py_?spy|watch_?dog|heartbeat|faulthandler|_?monitor(_\w+)?$", re.I)
SPECIFIC_KINDS = tuple(TABLES["calls"]["delegated"])


@dataclass(frozen=True, slots=True)
class ThreadState:
    """One thread: its name, its wait, and its relation to the GIL."""

    thread: str
    wait: Wait
    holds_gil: bool
    waits_for_gil: bool


def view(
    threads: tuple[Thread, ...], seen: dict[int, tuple[ThreadState, ...]], source: dict[str, str]
) -> tuple[ThreadState, ...]:
    """Return the waits of all threads, main thread first. Equal dumps are one object, so
    they are cached by identity.
    """
    if id(threads) not in seen:
        main = main_thread(threads)
        ordered = sorted((t for t in threads if t.frames), key=lambda thread: thread is not main)
        seen[id(threads)] = tuple(
            ThreadState(
                thread.name or ("MainThread" if thread is main else UNNAMED),
                refined(wait_of(thread.frames), thread, source),
                bool(thread.holds_gil),
                bool(thread.waits_for_gil),
            )
            for thread in ordered
        )
    return seen[id(threads)]


def refined(wait: Wait, thread: Thread, source: dict[str, str]) -> Wait:
    """Refine a stack that shows no wait: running if the dump saw it run, else blocked in something
    not shown.
    """
    if thread.waits_for_gil:
        return replace(wait, kind="gil", operation="GIL")
    if wait.kind == "running" and not (thread.active or thread.holds_gil):
        return kind_from_source(wait, [f for f in thread.frames if not f.native], source)
    return wait


def kind_from_source(wait: Wait, python: list[Frame], source: dict[str, str]) -> Wait:
    """Classify a wait in C by the text of the source line; `blocked` where the text does not
    identify it.
    """
    texts = [source.get(f"{frame.file}:{frame.line}", "") for frame in python[:4]]
    for row in SOURCE_WAITS:
        if not texts or not row.function.search(texts[0]):
            continue
        kind, operation = row.value, row.operation
        phases = wait.phases | {"cleanup"} if kind == "destroy" else wait.phases
        if kind == "collective" and (posted := POSTED.search(" ".join(texts))):
            # `work.wait()` waits for what this line, or a caller's, has posted.
            kind, operation = "p2p" if posted[1] else "collective", posted[0]
        return replace(wait, kind=kind, operation=operation, phases=phases)
    return replace(wait, kind="blocked")


def best_sample(views: list[tuple[ThreadState, ...]]) -> int:
    """Return the index of the last sample, or of one with the same Python stack and native frames
    below it.
    """
    last = max((i for i, v in enumerate(views) if v), default=0)
    if not views[last]:
        return last
    stack = views[last][0].wait.python
    for i, v in enumerate(views):
        if v and len(v[0].wait.python) < len(v[0].wait.frames) and v[0].wait.python == stack:
            return i
    return last


def effective(threads: tuple[ThreadState, ...], dump: ProcessDump) -> tuple[Wait, str]:
    """Return the wait of the process: its main thread's, unless that only waits for a thread with a
    more specific wait.
    """
    if not threads:
        return Wait("nothing", "", None, ()), ""
    main = threads[0]
    wait = with_kernel(main.wait, dump.facts)
    if wait.kind in ("backward", "device"):
        autograd = [t for t in threads[1:] if from_autograd(t)]
        aborting = [t for t in threads[1:] if t.wait.kind == "destroy"]
        for other in (*autograd, *aborting):
            if other.wait.kind in ("collective", "p2p", "destroy"):
                return replace(other.wait, phases=wait.phases | other.wait.phases), other.thread
        if autograd and wait.kind == "backward":
            return replace(wait, kind="device", operation="device sync"), main.thread
    if wait.operation == WORKER_LOOP:
        # Ray runs the training function in a thread of its own; its main thread only serves calls.
        for other in threads[1:]:
            if other.wait.chain and other.wait.kind not in ("idle", "event", "sleep"):
                return other.wait, other.thread
    if wait.kind in DELEGATING and not ("cleanup" in wait.phases and not wait.chain):
        # A thread that is itself stuck in a lock explains its process only where no other does.
        locked = ("lock",) if wait.kind != "lock" else ()
        for kinds in (SPECIFIC_KINDS, locked):
            for other in threads[1:]:
                theirs = other.wait
                if any(WATCHES.search(frame.function) for frame in theirs.frames):
                    continue
                if theirs.kind in kinds and (theirs.chain or theirs.kind in ("collective", "p2p")):
                    return replace(theirs, phases=wait.phases | theirs.phases), other.thread
    return wait, main.thread


def from_autograd(thread: ThreadState) -> bool:
    """True for autograd's own threads: they have no name and no Python entry frame at the bottom of
    their stacks.
    """
    bottom = thread.wait.frames[-1].function if thread.wait.frames else ""
    return bottom not in ("_bootstrap", "<module>", "") and thread.thread == UNNAMED


def with_kernel(wait: Wait, facts: ProcessFacts) -> Wait:
    """Classify a wait by the kernel function it sleeps in, only where the stack itself does not
    identify it.
    """
    if facts.state in ("T", "t"):
        return replace(wait, kind="stopped", operation="stopped")
    if wait.kind not in ("blocked", "running") or not facts.wchan:
        return wait
    kernel = first(KERNEL, facts.wchan)
    return replace(wait, kind=kernel[0], operation=facts.wchan) if kernel else wait
