"""Saving or loading a checkpoint blocks the job.

What it looks like: one rank writes, or waits for its background writer or for the last asynchronous
save, and the others wait in the barrier after it.

Common causes: storage that is full, slow or gone; an asynchronous save on the same process group as
training (give DCP a gloo group of its own): its thread and the main thread enqueue collectives in
another order on each rank; a writer process that died; rank 0 gathering the complete state dict
while the others time out.

If every rank is in the checkpoint's barrier and none writes, the checkpoint is not the cause: check
the network. If one rank is elsewhere altogether, look there first.
"""

from hangdoctor.case import Case, ProcessState
from hangdoctor.graph import Graph
from hangdoctor.rules.verdict import (
    Verdict,
    confidence,
    name_ranks,
    operation,
    place,
    ranks_of,
    source_verdict,
    stack_evidence,
    step,
    stillness,
    thread_evidence,
    waiting_evidence,
    waiting_for,
)
from hangdoctor.waits import ThreadState, context

STORAGE = step(
    "df -h CHECKPOINT_FOLDER; time dd if=/dev/zero of=CHECKPOINT_FOLDER/probe bs=1M count=64 oflag=direct",
    "is the storage full, slow or gone?",
    "writes 64 MiB",
)
OWN_GROUP = step(
    "dcp.async_save(..., process_group=dist.new_group(backend='gloo'))",
    "separates the collectives of the save from those of training",
)


def judge(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict if the pattern is present, else None."""
    saving = [s for s in graph.source_ranks if saves(s)]
    if not saving:
        return None if graph.sources else shared_group(case, graph)
    return source_verdict(
        "checkpoint_stall",
        case,
        graph,
        saving,
        "for its checkpoint",
        (STORAGE, OWN_GROUP),
        ("The checkpoint's files grow between the samples: then it is slow, not stuck.",),
        "high" if len(saving) < len(case.ranks) else "medium",
    )


def shared_group(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict for a save in the background whose collectives meet those of the main
    threads: two threads of one group have no common order.
    """
    both = [s for s in graph.waiting_ranks if saver_thread(s)]
    if not both:
        return None
    return Verdict(
        "checkpoint_stall",
        confidence(case, graph, both, "medium"),
        ranks_of(both) if len(both) < len(case.ranks) else (),
        f"A background save of {name_ranks(both)} is in a collective while the main thread waits in "
        f"{operation(both[0])} at {place(both[0])}; {waiting_for(graph)}.",
        tuple(thread_evidence(s, thread, "saves in") for s in both[:4] if (thread := saver_thread(s)))
        + stack_evidence(both[:4], f"waits in {operation(both[0])}")
        + waiting_evidence(graph, both)
        + stillness(case),
        (OWN_GROUP, STORAGE),
        ("A group of its own for the save: then the main thread's collective is stuck by itself.",),
    )


def saver_thread(process_state: ProcessState) -> ThreadState | None:
    for thread in process_state.threads[1:]:
        wait = thread.thread_wait
        if wait.kind in ("collective", "p2p") and "checkpoint" in wait.phases:
            return thread if process_state.thread != thread.thread else None
    return None


def saves(process_state: ProcessState) -> bool:
    thread_wait = process_state.thread_wait
    if thread_wait.kind in ("stopped", "prompt", "file_lock") or "error" in thread_wait.phases:
        return False
    if context(thread_wait.frames, frozenset({"cleanup", "checkpoint"})) == "cleanup":
        return False
    return thread_wait.kind == "checkpoint" or "checkpoint" in thread_wait.phases
