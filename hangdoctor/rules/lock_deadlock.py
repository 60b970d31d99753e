"""Threads of one process wait for each other, or for a lock file whose owner is gone.

What it looks like: the main thread waits for a lock, and its holder waits for another lock or is in
native code; or one thread holds the GIL, sleeps and does not move; or a process waits for a file
lock (torch_extensions, a shared cache).

Common causes: two locks acquired in opposite order; fork() while a thread held a lock (data-loader
workers, loggers, the import lock of a module); a pool whose child never gets such a lock; a native
extension that blocks without releasing the GIL; a lock file left by a killed process.

Peers in a collective are victims. The native pass (`py-spy dump --native`) is what shows locks:
plain Python frames do not.
"""

from hangdoctor.case import Case, ProcessState
from hangdoctor.frames import show
from hangdoctor.graph import Graph
from hangdoctor.model import Confidence, Evidence
from hangdoctor.rules.verdict import Verdict, source_verdict, step
from hangdoctor.tables import IMPORT_LOCK

STEPS = (
    step(
        "py-spy dump --native --pid PID",
        "names the lock call of every thread",
        "stops the process for about 0.1 s",
    ),
    step(
        "gdb -p PID -batch -ex 'thread apply all bt'",
        "shows which native frame holds the GIL or a mutex",
        "stops the process for seconds",
    ),
)


def judge(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict if the pattern is present, else None."""
    # A collective releases the GIL: where waiting ranks are reported to hold it, the dump's flag is
    # unreliable.
    trusted = not any(s.threads[0].holds_gil for s in graph.waiting_ranks if s.facts.state == "S")
    if held := [s for s in graph.source_ranks if trusted and holds_gil_asleep(s, case)]:
        best: Confidence = "high" if held[0].cpu_fraction is not None else "medium"
        what = "in native code that keeps the GIL"
        return source_verdict(
            "lock_deadlock", case, graph, held, what, STEPS, gil_refuted(), best, other_threads(held)
        )
    files = [s for s in graph.source_ranks if s.thread_wait.kind == "file_lock"]
    if files:
        steps = (step("lslocks; ls -l LOCKFILE", "shows who holds the file lock, and since when"), *STEPS[:1])
        refute = ("The owner of the lock is alive and computes: then this rank waits for its turn.",)
        return source_verdict("lock_deadlock", case, graph, files, "for a lock file", steps, refute)
    locked = [
        s
        for s in graph.source_ranks
        if waits_for_locked_child(s, case)
        or (s.thread_wait.kind in ("lock", "gil") and not behind_loader(s))
        or import_cycle(s)
    ]
    if not locked:
        return None
    cycle = any(rival(s) or import_cycle(s) for s in locked)
    what = "for a lock while another of its threads waits for a lock too" if cycle else "for a lock"
    refute = ("A thread that holds the lock and computes: then the lock is only released late.",)
    more = other_threads(locked)
    return source_verdict(
        "lock_deadlock", case, graph, locked, what, STEPS, refute, "high" if cycle else "medium", more
    )


def holds_gil_asleep(process_state: ProcessState, case: Case) -> bool:
    """True if a thread owns the GIL although the process used no CPU and its stack did not change:
    native code keeps the GIL.
    """
    if process_state.works or process_state.moved or case.num_samples < 2:
        return False
    holder = next((t for t in process_state.threads if t.holds_gil), None)
    if holder is None or process_state.thread_wait.kind == "stopped":
        return False
    waits = any(
        t.waits_for_gil or t.thread_wait.kind == "gil" for t in process_state.threads if t is not holder
    )
    return waits or (process_state.ran is False and process_state.facts.state == "S")


def waits_for_locked_child(process_state: ProcessState, case: Case) -> bool:
    """True if a rank waits for a child process that never gets a lock, as after a fork; the workers
    of a data loader belong to dataloader_stall.
    """
    wait = process_state.thread_wait
    if wait.kind not in ("subprocess", "join", "future", "queue") or wait.phases & {"cleanup", "data"}:
        return False
    return any(child.thread_wait.kind == "lock" for child in case.children_of(process_state.name))


def behind_loader(process_state: ProcessState) -> bool:
    """True if a rank waits for a lock inside the data pipeline: then that pipeline is stuck."""
    phases = process_state.thread_wait.phases
    return "data" in phases and process_state.parent is None and not isinstance(process_state.rank, str)


def import_cycle(process_state: ProcessState) -> bool:
    """True if a thread waits for the import lock of a module while the main thread, inside an
    import, waits for a thread.
    """
    main = process_state.thread_wait
    inside = any(frame.function == "_find_and_load" for frame in main.frames)
    return inside and any(t.thread_wait.operation == IMPORT_LOCK for t in process_state.threads[1:])


def rival(process_state: ProcessState) -> bool:
    return any(
        t.thread_wait.kind in ("lock", "gil") and t.thread_wait.chain for t in process_state.threads[1:]
    )


def other_threads(process_states: list[ProcessState]) -> tuple[Evidence, ...]:
    found = []
    for process_state in process_states[:4]:
        for thread in process_state.threads[1:6]:
            if thread.thread_wait.frame and (thread.thread_wait.kind in ("lock", "gil") or thread.holds_gil):
                fact = "holds the GIL" if thread.holds_gil else f"waits for a {thread.thread_wait.operation}"
                found.append(
                    Evidence(
                        str(process_state.rank),
                        f"{fact} at {show(thread.thread_wait.frame)}",
                        process_state.name,
                        thread.thread,
                    )
                )
    return tuple(found)


def gil_refuted() -> tuple[str, ...]:
    return ("CPU time of the holder that grows: then it computes with the GIL held and will finish.",)
