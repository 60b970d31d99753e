"""A rank is exiting and waits for an operation that will not complete.

What it looks like: one rank is in destroy_process_group, in a barrier of its clean-up, in an atexit
handler, or joins a thread, pool or worker at exit; its peers still wait for it in a collective of
the training loop, or exit too and wait elsewhere.

Common causes: an exception on one rank whose `finally:` destroys the process group while its peers
are still in all_reduce; a swallowed exception followed by a barrier in the clean-up; a non-daemon
thread that nothing stops; a data loader or writer that is joined while it waits for its own reader.
When every rank is in destroy_process_group, look for CUDA graphs that captured a collective: NCCL
2.26 and later wait until they are destroyed.

A collective in a clean-up belongs here, not to collective_mismatch: its peers never call it. A save
that closes its writer is a save.

What helps: abort instead of destroy on the error path, and no collectives in `finally`.
"""

from hangdoctor.case import Case, ProcessState
from hangdoctor.graph import Graph
from hangdoctor.rules.verdict import (
    Verdict,
    begin,
    confidence,
    name_ranks,
    operation,
    place,
    plural,
    ranks_of,
    stack_evidence,
    step,
    stillness,
    waiting_evidence,
)
from hangdoctor.waits import context

# Exit functions that no training step calls: sufficient for high confidence.
LAST_CALLS = {
    "destroy_process_group",
    "_shutdown",
    "_exit_function",
    "_python_exit",
    "_run_exitfuncs",
    "_shutdown_workers",
}


def judge(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict if the pattern is present, else None."""
    entered = functions_of_entered(case)
    leaving = leaving_ranks(case, entered)
    if not leaving:
        return None
    staying = [s for s in graph.waiting_ranks if s not in leaving]
    # If no rank trains any more, a rank that only waits for its peers is a victim of one that
    # waits for something else.
    held_up = [s for s in leaving if not s.thread_wait.waits_for_peers]
    culprits = leaving if staying else held_up or leaving
    certain = bool(staying) and all(last_call(s) or in_exit_handler(s, entered) for s in culprits)
    where = place(culprits[0])
    if staying:
        others = f"{name_ranks(staying)} still {plural(staying, 'waits', 'wait')} in {operation(staying[0])}"
    else:
        others = (
            "the others are exiting too" if len(leaving) > len(culprits) else "no rank waits for it any more"
        )
    return Verdict(
        "cleanup_deadlock",
        confidence(case, graph, culprits, "high" if certain else "medium"),
        ranks_of(culprits),
        f"{begin(name_ranks(culprits))} {plural(culprits, 'is', 'are')} exiting ({operation(culprits[0])} at {where}) "
        f"while {others}.",
        stack_evidence(culprits, f"exiting: {operation(culprits[0])}", graph)
        + waiting_evidence(graph, culprits)
        + stillness(case),
        (
            step(
                "grep -n -B2 -A20 Traceback LOG_OF_THAT_RANK",
                "finds the exception that led to the clean-up",
            ),
            step(
                "torch.distributed.distributed_c10d._abort_process_group()",
                "use on the error path instead of destroy_process_group: it does not wait",
                "peers fail at once",
            ),
            step(
                "graph.reset() before destroy_process_group()",
                "only if all ranks are in destroy and CUDA graphs captured collectives",
            ),
        ),
        (
            "The other ranks reach their own clean-up within the time-out: then the job was only ending.",
            "A culprit that is back in the training loop in a later sample.",
        ),
    )


def last_call(process_state: ProcessState) -> bool:
    return process_state.thread_wait.kind == "destroy" or any(
        frame.function in LAST_CALLS for frame in process_state.thread_wait.frames
    )


def functions_of_entered(case: Case) -> set[tuple[str, str]]:
    """Return name and file of each function in the stacks that begin in a module, a thread or a
    spawned process.
    """
    waits = {id(s.thread_wait): s for s in case.ranks}  # equal ones are one object
    return {(f.function, f.file) for s in waits.values() if has_entry(s) for f in s.thread_wait.frames}


def leaving_ranks(case: Case, entered: set[tuple[str, str]]) -> list[ProcessState]:
    judged: dict[tuple[int, str, str], bool] = {}
    leaving = []
    for process_state in case.ranks:
        key = (id(process_state.thread_wait), process_state.thread, process_state.status)
        if key not in judged:
            judged[key] = leaves(process_state, entered)
        if judged[key]:
            leaving.append(process_state)
    return leaving


def leaves(process_state: ProcessState, entered: set[tuple[str, str]]) -> bool:
    """True if a stack is that of an exiting rank: a clean-up function, or an exit handler that
    Python itself calls.
    """
    if process_state.thread_wait.kind in ("data", "stopped", "launcher") or process_state.status == "stopped":
        return False
    if process_state.thread_wait.kind == "future" and process_state.thread_wait.operation == "pool result":
        return False
    if context(process_state.thread_wait.frames, frozenset({"cleanup", "checkpoint"})) == "checkpoint":
        return False
    return "cleanup" in process_state.thread_wait.phases or in_exit_handler(process_state, entered)


def in_exit_handler(process_state: ProcessState, entered: set[tuple[str, str]]) -> bool:
    """True for an atexit callback: C calls it, so its stack has no `<module>` at the bottom, while
    its peers' stacks have one.
    """
    python = process_state.thread_wait.python
    if process_state.thread != "MainThread" or not 0 < len(python) < 100 or has_entry(process_state):
        return False
    # An excerpt that was cut ends in a function that its peers call as well.
    return bool(entered) and (python[-1].function, python[-1].file) not in entered


def has_entry(process_state: ProcessState) -> bool:
    entries = ("<module>", "_run_code", "_run_module_as_main", "spawn_main", "_bootstrap", "_bootstrap_inner")
    return any(f.function in entries for f in process_state.thread_wait.python[-6:])
