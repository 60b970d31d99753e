"""Rules for ranks outside the operation that their peers wait in: what each of them waits for."""

import itertools
import re

from hangdoctor.case import Case, Process, import_cycle
from hangdoctor.frames import TABLES, show
from hangdoctor.graph import Graph
from hangdoctor.model import Confidence, Evidence, Label
from hangdoctor.rules.verdict import (
    LEVELS,
    Verdict,
    begin,
    child_evidence,
    confidence,
    make_verdict,
    name_ranks,
    operation,
    place,
    plural,
    stack_evidence,
    stillness,
    thread_evidence,
    waiting_evidence,
    waiting_for,
)
from hangdoctor.tables import EVENT_LOOP, WORKER_LOOP, phases_of
from hangdoctor.waits import ThreadState, context

LOADERS = ("torch/utils/data/", "torchdata/", "webdataset/")
# Waits for something outside the job, by the operation or else the kind, as a phrase.
OUTSIDE: dict[str, str] = TABLES["outside"]


def one_rank_verdict(
    label: Label,
    case: Case,
    graph: Graph,
    culprits: list[Process],
    what: str,
    best: Confidence = "high",
    more: tuple[Evidence, ...] = (),
    variant: str = "",
) -> Verdict:
    """Return the verdict of a rule of this file: some ranks wait `what`, their peers for them."""
    waits = plural(culprits, "waits", "wait")
    return make_verdict(
        label,
        confidence(case, graph, culprits, best if graph.waiting or best == "low" else "medium"),
        culprits,
        f"{begin(name_ranks(culprits))} {waits} {what} at {place(culprits[0])}; {waiting_for(graph)}.",
        stack_evidence(culprits, f"waits {what}", graph) + more + waiting_evidence(graph) + stillness(case),
        variant,
    )


def checkpoint_stall(case: Case, graph: Graph) -> Verdict | None:
    """Look for ranks that save, or a background save that meets the main thread's collectives."""
    saving = [s for s in graph.source_ranks if saves(s)]
    if saving:
        best: Confidence = "high" if len(saving) < len(case.ranks) else "medium"
        return one_rank_verdict("checkpoint_stall", case, graph, saving, "for its checkpoint", best)
    if graph.sources:
        return None
    both = [s for s in graph.waiting_ranks if saver_thread(s)]
    if not both:
        return partial_save(case, graph)
    # Two threads of one group have no common order of their collectives.
    threads = tuple(thread_evidence(s, thread, "saves in") for s in both[:4] if (thread := saver_thread(s)))
    return make_verdict(
        "checkpoint_stall",
        confidence(case, graph, both, "medium"),
        both if len(both) < len(case.ranks) else (),
        f"A background save of {name_ranks(both)} is in a collective while the main thread waits in "
        f"{operation(both[0])} at {place(both[0])}; {waiting_for(graph)}.",
        threads
        + stack_evidence(both[:4], f"waits in {operation(both[0])}")
        + waiting_evidence(graph, both)
        + stillness(case),
        "shared_group",
    )


def partial_save(case: Case, graph: Graph) -> Verdict | None:
    """Look for ranks that gather the state for a save while the others train on."""
    saving = [s for s in graph.waiting_ranks if saves(s)]
    if not saving or len(saving) * 2 > len(graph.waiting_ranks) or case.lost:
        return None
    what = f"for its peers in {operation(saving[0])} of a save"
    best: Confidence = (
        "high" if len(saving) == 1 and len(graph.waiting) == 2 and len(case.ranks) > 2 else "medium"
    )
    return one_rank_verdict("checkpoint_stall", case, graph, saving, what, best, variant="shared_group")


def saver_thread(process: Process) -> ThreadState | None:
    for thread in process.threads[1:]:
        if thread.wait.kind in ("collective", "p2p") and "checkpoint" in thread.wait.phases:
            return thread if process.thread != thread.thread else None
    return None


def saves(process: Process) -> bool:
    wait = process.wait
    if wait.kind in ("stopped", "prompt", "file_lock") or "error" in wait.phases:
        return False
    if context(wait.frames, frozenset({"cleanup", "checkpoint"})) == "cleanup":
        return False
    return wait.kind == "checkpoint" or "checkpoint" in wait.phases


def dataloader_stall(case: Case, graph: Graph) -> Verdict | None:
    starved = [s for s in graph.source_ranks if waits_for_data(s)]
    if not starved:
        return None
    best: Confidence = "high" if len(starved) < len(case.ranks) else "medium"
    workers = tuple(e for e in child_evidence(case, starved, "its worker waits in") if " at " in e.fact)
    return one_rank_verdict("dataloader_stall", case, graph, starved, "for data", best, workers)


def waits_for_data(process: Process) -> bool:
    wait = process.wait
    if wait.phases & {"cleanup"} or wait.kind in ("stopped", "running", "compile"):
        return False
    # A function called fetch_samples may query a server; a thread behind a loader's queue loads.
    if wait.kind in ("http", "rpc", "subprocess", "prompt"):
        main = process.threads[0].wait
        loads = main.kind in ("queue", "data") and "data" in main.phases
        return loads or any(frame.file.startswith(LOADERS) for frame in wait.frames)
    return wait.kind == "data" or "data" in wait.phases


def external_wait(case: Case, graph: Graph) -> Verdict | None:
    outside = [s for s in graph.source_ranks if s.wait.kind in OUTSIDE or polls_outside(s, not graph.waiting)]
    outside = [s for s in outside if "cleanup" not in s.wait.phases] or outside
    if not outside:
        return None
    wait, children = outside[0].wait, child_evidence(case, outside, "its child process is in")
    best: Confidence = "high" if wait.kind in ("http", "rpc", "subprocess") or children else "medium"
    exiting = wait.kind == "queue" and any("cleanup" in s.wait.phases for s in case.ranks)
    if exiting or wait.operation == WORKER_LOOP:
        best = "low"  # the other end of the queue is exiting; a worker without a task is sound
    usual = OUTSIDE.get(wait.kind, "for samples, rewards or a server")
    what = OUTSIDE.get(wait.operation, usual)
    return one_rank_verdict("external_wait", case, graph, outside, what, best, children)


def polls_outside(process: Process, alone: bool) -> bool:
    """True if a rank sleeps or idles between requests to an engine or a reward service: `while not
    ready: sleep` in a rollout.
    """
    wait = process.wait
    if wait.operation == WORKER_LOOP:
        return alone  # a worker that nobody gave a task, and no rank that waits for it
    if wait.operation == EVENT_LOOP and wait.chain:
        return "engine" not in wait.phases
    if "outside" not in wait.phases:
        return False
    polls = wait.frame is not None and re.search("wait|poll|sleep", wait.frame.function)
    return wait.kind in ("sleep", "idle", "event") or (wait.kind == "blocked" and bool(polls))


def lock_deadlock(case: Case, graph: Graph) -> Verdict | None:
    """Look for a GIL that a sleeping thread keeps, a lock file, a lock, and a child without one."""
    sources = graph.source_ranks
    # A collective releases the GIL: where waiting ranks are reported to hold it, the dump's flag is
    # unreliable.
    trusted = not any(s.threads[0].holds_gil for s in graph.waiting_ranks if s.facts.state == "S")
    if held := [s for s in sources if trusted and holds_gil_asleep(s, case)]:
        best: Confidence = "high" if held[0].cpu_fraction is not None else "medium"
        what, others = "in native code that keeps the GIL", locked_threads(held)
        return one_rank_verdict("lock_deadlock", case, graph, held, what, best, others, "gil")
    files = [s for s in sources if s.wait.kind == "file_lock"]
    if files and not holders_of(files, sources):
        return one_rank_verdict("lock_deadlock", case, graph, files, "for a lock file", variant="files")
    locked = [
        s
        for s in sources
        if waits_for_locked_child(s, case)
        or (s.wait.kind in ("lock", "gil") and ("data" not in s.wait.phases or is_child(s)))
        or import_cycle(s)
    ]
    if not locked:
        return None
    rivals = [t for s in locked for t in s.threads[1:] if t.wait.kind in ("lock", "gil") and t.wait.chain]
    cycle = bool(rivals) or any(map(import_cycle, locked))
    what = "for a lock while another of its threads waits for a lock too" if cycle else "for a lock"
    best = "high" if cycle else "medium"
    return one_rank_verdict("lock_deadlock", case, graph, locked, what, best, locked_threads(locked))


def holders_of(waiting: list[Process], sources: tuple[Process, ...]) -> list[Process]:
    """Return the ranks that are further in the function in which others wait for a lock file."""
    pairs = (pair for s in waiting for pair in itertools.pairwise(s.wait.frames) if pair[0] == s.wait.frame)
    callers = {caller.function for _, caller in pairs}
    others = (s for s in sources if s.wait.kind != "file_lock")
    return [s for s in others if any(f.function in callers for f in s.wait.frames[1:])]


def holds_gil_asleep(process: Process, case: Case) -> bool:
    """True if a thread owns the GIL although the process used no CPU and its stack did not change:
    native code keeps the GIL.
    """
    if process.works or process.moved or case.num_samples < 2:
        return False
    holder = next((t for t in process.threads if t.holds_gil), None)
    if holder is None or process.wait.kind == "stopped":
        return False
    others = [t for t in process.threads if t is not holder]
    if any(t.waits_for_gil or t.wait.kind == "gil" for t in others):
        return True
    return process.ran is False and process.facts.state == "S"


def waits_for_locked_child(process: Process, case: Case) -> bool:
    """True if a rank waits for a child process that never gets a lock, as after a fork; the workers
    of a data loader belong to dataloader_stall.
    """
    wait = process.wait
    if wait.kind not in ("subprocess", "join", "future", "queue") or wait.phases & {"cleanup", "data"}:
        return False
    return any(child.wait.kind == "lock" for child in case.children_of(process.name))


def is_child(process: Process) -> bool:
    """True if it is no rank: a rank that waits for a lock in the data pipeline is held up by that."""
    return process.parent is not None or isinstance(process.rank, str)


def locked_threads(processes: list[Process]) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(
            str(process.rank),
            f"{'holds the GIL' if thread.holds_gil else f'waits for a {thread.wait.operation}'} at {show(frame)}",
            process.name,
            thread.thread,
        )
        for process in processes[:4]
        for thread in process.threads[1:6]
        if (frame := thread.wait.frame) and (thread.wait.kind in ("lock", "gil") or thread.holds_gil)
    )


def partial_exception(case: Case, graph: Graph) -> Verdict | None:
    # An error handler may wait for its peers itself, in a collective that they will not reach.
    apart = graph.source_ranks if len(graph.waiting) < 2 else case.ranks
    strong = [s for s in apart if s.wait.kind == "prompt" or in_own_error(s, graph)]
    asleep = [
        s
        for s in graph.source_ranks
        if s.wait.kind in ("sleep", "idle", "event") and not polls_outside(s, False)
        if "engine" not in s.wait.phases
    ]
    culprits = strong or asleep
    if not culprits or (not graph.waiting and not strong):
        return None
    failed = failures(case, culprits)
    phases, kind = culprits[0].wait.phases, culprits[0].wait.kind
    if strong:
        best: Confidence = "medium" if {"data", "checkpoint"} & phases else "high"
    else:
        best = "low" if kind == "event" and not failed else "medium"
    level = LEVELS[min(LEVELS.index(best) + bool(failed), 2)]
    what = what_of(culprits[0])
    return one_rank_verdict("partial_exception", case, graph, culprits, what, level, failed)


def in_own_error(process: Process, graph: Graph) -> bool:
    """True if the stack contains an error path that its peers' stacks lack: a retry wrapper around
    all ranks proves nothing.
    """
    if "error" not in process.wait.phases:
        return False
    shared = [{(f.function, f.file) for f in c.wait.frames} for c in graph.waiting[:8]]
    handlers = {
        (f.function, f.file)
        for f in process.wait.frames
        if not f.native and "error" in phases_of(f.function, f.file)
    }
    return not shared or any(not all(handler in frames for frames in shared) for handler in handlers)


def what_of(process: Process) -> str:
    if process.wait.kind == "prompt":
        return "at a prompt without a user"
    if "error" in process.wait.phases:
        return "in an error path"
    return {"sleep": "in a sleep", "idle": "in an idle loop"}.get(process.wait.kind, "outside the step")


def failures(case: Case, culprits: list[Process]) -> tuple[Evidence, ...]:
    """Return the exceptions in the culprits' error files and logs."""
    ranks = {s.rank for s in culprits}
    found = [
        Evidence(str(error.rank), f"its error file: {error.message[:200]}")
        for error in case.snapshot.errors
        if error.rank in ranks
    ]
    for log in case.snapshot.logs:
        line = next((line for line in reversed(log.lines) if "Error" in line or "Traceback" in line), None)
        if log.rank in ranks and line:
            found.append(Evidence(str(log.rank), f"its log: {line[:200]}", log.name))
    return tuple(found)
