"""The wait of a process from all its threads: that of the main thread, unless it only waits for
another thread.
"""

import re
from dataclasses import dataclass, replace

from hangdoctor.frames import main_thread
from hangdoctor.model import Frame, ProcessDump, ProcessFacts, Thread
from hangdoctor.patterns import WORKER_LOOP
from hangdoctor.waits import POSTED, SOURCE, WCHAN, ThreadWait, compiled, thread_wait_of

UNNAMED = "unnamed thread"
# A main thread that waits for another thread of its process: that thread shows the real wait.
DELEGATING = ("future", "event", "queue", "join", "idle", "lock")
# Threads that look after the process do not show what it waits for.
WATCHES = re.compile(r"py_?spy|watch_?dog|heartbeat|faulthandler|_?monitor(_\w+)?$", re.I)
SPECIFIC_KINDS = (
    "http",
    "rpc",
    "collective",
    "p2p",
    "checkpoint",
    "subprocess",
    "data",
    "store",
    "file_lock",
    "prompt",
)


@dataclass(frozen=True, slots=True)
class ThreadState:
    """One thread: its name, its wait, and its relation to the GIL."""

    thread: str
    thread_wait: ThreadWait
    holds_gil: bool
    waits_for_gil: bool


def view(
    threads: tuple[Thread, ...], seen: dict[int, tuple[ThreadState, ...]], source: dict[str, str]
) -> tuple[ThreadState, ...]:
    """Return the thread_waits of all threads, main thread first. Equal dumps are one object, so
    they are cached by identity.
    """
    if id(threads) not in seen:
        main = main_thread(threads)
        ordered = sorted((t for t in threads if t.frames), key=lambda thread: thread is not main)
        seen[id(threads)] = tuple(
            ThreadState(
                thread.name or ("MainThread" if thread is main else UNNAMED),
                refined(thread_wait_of(thread.frames), thread, source),
                bool(thread.holds_gil),
                bool(thread.waits_for_gil),
            )
            for thread in ordered
        )
    return seen[id(threads)]


def refined(thread_wait: ThreadWait, thread: Thread, source: dict[str, str]) -> ThreadWait:
    """Refine a stack that shows no wait: running if the dump saw it run, else blocked in something
    not shown.
    """
    if thread.waits_for_gil:
        return replace(thread_wait, kind="gil", operation="GIL")
    if thread_wait.kind == "running" and not (thread.active or thread.holds_gil):
        return kind_from_source(thread_wait, [f for f in thread.frames if not f.native], source)
    return thread_wait


def kind_from_source(thread_wait: ThreadWait, python: list[Frame], source: dict[str, str]) -> ThreadWait:
    """Classify a wait in C by the text of the source line; `blocked` where the text does not
    identify it.
    """
    texts = [source.get(f"{frame.file}:{frame.line}", "") for frame in python[:4]]
    for kind, operation, pattern in SOURCE:
        if not texts or not compiled(pattern).search(texts[0]):
            continue
        phases = thread_wait.phases | {"cleanup"} if kind == "destroy" else thread_wait.phases
        if kind == "collective" and (posted := POSTED.search(" ".join(texts))):
            # `work.wait()` waits for what this line, or a caller's, has posted.
            kind, operation = "p2p" if posted[1] else "collective", posted[0]
        return replace(thread_wait, kind=kind, operation=operation, phases=phases)
    return replace(thread_wait, kind="blocked")


def best_sample(views: list[tuple[ThreadState, ...]]) -> int:
    """Return the index of the last sample, or of one with the same Python stack and native frames
    below it.
    """
    last = max((i for i, v in enumerate(views) if v), default=0)
    if not views[last]:
        return last
    stack = views[last][0].thread_wait.python
    for i, v in enumerate(views):
        if (
            v
            and len(v[0].thread_wait.python) < len(v[0].thread_wait.frames)
            and v[0].thread_wait.python == stack
        ):
            return i
    return last


def effective(threads: tuple[ThreadState, ...], dump: ProcessDump) -> tuple[ThreadWait, str]:
    """Return the wait of the process: its main thread's, unless that only waits for a thread with a
    more specific wait.
    """
    if not threads:
        return ThreadWait("nothing", "", None, ()), ""
    main = threads[0]
    thread_wait = with_kernel(main.thread_wait, dump.facts)
    if thread_wait.kind in ("backward", "device"):
        autograd = [t for t in threads[1:] if from_autograd(t)]
        for other in autograd:
            if other.thread_wait.kind in ("collective", "p2p"):
                return replace(
                    other.thread_wait, phases=thread_wait.phases | other.thread_wait.phases
                ), other.thread
        if autograd and thread_wait.kind == "backward":
            return replace(thread_wait, kind="device", operation="device sync"), main.thread
    if thread_wait.operation == WORKER_LOOP:
        # Ray runs the training function in a thread of its own; its main thread only serves calls.
        for other in threads[1:]:
            if other.thread_wait.chain and other.thread_wait.kind not in ("idle", "event", "sleep"):
                return other.thread_wait, other.thread
    if thread_wait.kind in DELEGATING and not ("cleanup" in thread_wait.phases and not thread_wait.chain):
        # A thread that is itself stuck in a lock explains its process only where no other does.
        locked = ("lock",) if thread_wait.kind != "lock" else ()
        for kinds in (SPECIFIC_KINDS, locked):
            for other in threads[1:]:
                wait = other.thread_wait
                if any(WATCHES.search(frame.function) for frame in wait.frames):
                    continue
                if wait.kind in kinds and (wait.chain or wait.kind in ("collective", "p2p")):
                    return replace(wait, phases=thread_wait.phases | wait.phases), other.thread
    return thread_wait, main.thread


def from_autograd(thread: ThreadState) -> bool:
    """True for autograd's own threads: they have no name and no Python entry frame at the bottom of
    their stacks.
    """
    bottom = thread.thread_wait.frames[-1].function if thread.thread_wait.frames else ""
    return bottom not in ("_bootstrap", "<module>", "") and thread.thread == UNNAMED


def with_kernel(thread_wait: ThreadWait, facts: ProcessFacts) -> ThreadWait:
    """Classify a wait by the kernel function it sleeps in, only where the stack itself does not
    identify it.
    """
    if facts.state in ("T", "t"):
        return replace(thread_wait, kind="stopped", operation="stopped")
    if thread_wait.kind not in ("blocked", "running") or not facts.wchan:
        return thread_wait
    for kind, pattern in WCHAN:
        if compiled(pattern).fullmatch(facts.wchan):
            return replace(thread_wait, kind=kind, operation=facts.wchan)
    return thread_wait
