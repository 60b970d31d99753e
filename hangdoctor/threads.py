"""The wait of a process from all its threads: that of the main thread, unless it only waits for
another thread.
"""

from dataclasses import dataclass, replace

from hangdoctor.frames import main_thread, python_only
from hangdoctor.model import Frame, ProcessDump, ProcessFacts, Thread
from hangdoctor.native import POSTED, SOURCE, WCHAN
from hangdoctor.waits import Stance, compiled, stance_of

UNNAMED = "unnamed thread"
# A main thread that waits for another thread of its process: that thread shows the real wait.
DELEGATING = ("future", "event", "queue", "join", "idle")
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
class ThreadStance:
    """One thread: its name, its wait, and its relation to the GIL."""

    thread: str
    stance: Stance
    holds_gil: bool
    waits_for_gil: bool


def view(
    threads: tuple[Thread, ...], seen: dict[int, tuple[ThreadStance, ...]], source: dict[str, str]
) -> tuple[ThreadStance, ...]:
    """Return the stances of all threads, main thread first. Equal dumps are one object, so they are
    cached by identity.
    """
    if id(threads) not in seen:
        main = main_thread(threads)
        ordered = sorted((t for t in threads if t.frames), key=lambda thread: thread is not main)
        seen[id(threads)] = tuple(
            ThreadStance(
                thread.name or ("MainThread" if thread is main else UNNAMED),
                refined(stance_of(thread.frames), thread, source),
                bool(thread.holds_gil),
                bool(thread.waits_for_gil),
            )
            for thread in ordered
        )
    return seen[id(threads)]


def refined(stance: Stance, thread: Thread, source: dict[str, str]) -> Stance:
    """Refine a stack that shows no wait: running if the dump saw it run, else blocked in something
    not shown.
    """
    if thread.waits_for_gil:
        return replace(stance, kind="gil", operation="GIL")
    if stance.kind == "running" and not (thread.active or thread.holds_gil):
        return kind_from_source(stance, [f for f in thread.frames if not f.native], source)
    return stance


def kind_from_source(stance: Stance, python: list[Frame], source: dict[str, str]) -> Stance:
    """Classify a wait in C by the text of the source line; `blocked` where the text does not
    identify it.
    """
    texts = [source.get(f"{frame.file}:{frame.line}", "") for frame in python[:4]]
    for kind, operation, pattern in SOURCE:
        if not texts or not compiled(pattern).search(texts[0]):
            continue
        phases = stance.phases | {"cleanup"} if kind == "destroy" else stance.phases
        if kind == "collective" and (posted := POSTED.search(" ".join(texts))):
            # `work.wait()` waits for what this line, or a caller's, has posted.
            kind, operation = "p2p" if posted[1] else "collective", posted[0]
        return replace(stance, kind=kind, operation=operation, phases=phases)
    return replace(stance, kind="blocked")


def best_sample(views: list[tuple[ThreadStance, ...]]) -> int:
    """Return the index of the last sample, or of one with the same Python stack and native frames
    below it.
    """
    last = max((i for i, v in enumerate(views) if v), default=0)
    if not views[last]:
        return last
    stack = python_only(views[last][0].stance.frames)
    for i, v in enumerate(views):
        if v and any(f.native for f in v[0].stance.frames) and python_only(v[0].stance.frames) == stack:
            return i
    return last


def effective(threads: tuple[ThreadStance, ...], dump: ProcessDump) -> tuple[Stance, str]:
    """Return the wait of the process: its main thread's, unless that only waits for a thread with a
    more specific wait.
    """
    if not threads:
        return Stance("nothing", "", None, ()), ""
    main = threads[0]
    stance = with_kernel(main.stance, dump.facts)
    if stance.kind in ("backward", "device"):
        autograd = [t for t in threads[1:] if from_autograd(t)]
        for other in autograd:
            if other.stance.kind in ("collective", "p2p"):
                return replace(other.stance, phases=stance.phases | other.stance.phases), other.thread
        if autograd and stance.kind == "backward":
            return replace(stance, kind="device", operation="device sync"), main.thread
    if stance.kind in DELEGATING and not ("cleanup" in stance.phases and not stance.chain):
        for other in threads[1:]:
            if other.stance.kind in SPECIFIC_KINDS and (
                other.stance.chain or other.stance.kind in ("collective", "p2p")
            ):
                return replace(other.stance, phases=stance.phases | other.stance.phases), other.thread
    return stance, main.thread


def from_autograd(thread: ThreadStance) -> bool:
    """True for autograd's own threads: they have no name and no Python entry frame at the bottom of
    their stacks.
    """
    bottom = thread.stance.frames[-1].function if thread.stance.frames else ""
    return bottom not in ("_bootstrap", "<module>", "") and thread.thread == UNNAMED


def with_kernel(stance: Stance, facts: ProcessFacts) -> Stance:
    """Classify a wait by the kernel function it sleeps in, only where the stack itself does not
    identify it.
    """
    if facts.state in ("T", "t"):
        return replace(stance, kind="stopped", operation="stopped")
    if stance.kind not in ("blocked", "running") or not facts.wchan:
        return stance
    for kind, pattern in WCHAN:
        if compiled(pattern).fullmatch(facts.wchan):
            return replace(stance, kind=kind, operation=facts.wchan)
    return stance
