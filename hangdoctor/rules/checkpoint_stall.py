"""Saving or loading a checkpoint blocks the job.

What it looks like: one rank writes, or waits for its background writer or for the last asynchronous
save, and the others wait in the barrier after it.

Common causes: storage that is full, slow or gone; an asynchronous save on the same process group as
training (give DCP a gloo group of its own); a writer process that died; rank 0 gathering the
complete state dict while the others time out.

If every rank is in the checkpoint's barrier and none writes, the checkpoint is not the cause: check
the network. If one rank is elsewhere altogether, look there first.
"""

from hangdoctor.case import Case, ProcessState
from hangdoctor.graph import Graph
from hangdoctor.rules.verdict import Verdict, source_verdict, step


def judge(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict if the pattern is present, else None."""
    saving = [s for s in graph.source_ranks if saves(s)]
    if not saving:
        return None
    return source_verdict(
        "checkpoint_stall",
        case,
        graph,
        saving,
        "for its checkpoint",
        (
            step(
                "df -h CHECKPOINT_FOLDER; time dd if=/dev/zero of=CHECKPOINT_FOLDER/probe bs=1M count=64 oflag=direct",
                "is the storage full, slow or gone?",
                "writes 64 MiB",
            ),
            step(
                "dcp.async_save(..., process_group=dist.new_group(backend='gloo'))",
                "separates the collectives of the save from those of training",
            ),
        ),
        ("The checkpoint's files grow between the samples: then it is slow, not stuck.",),
        "high" if len(saving) < len(case.ranks) else "medium",
    )


def saves(process_state: ProcessState) -> bool:
    """True if a rank saves or loads a checkpoint and is not exiting, failing or stopped."""
    thread_wait = process_state.thread_wait
    return (thread_wait.kind == "checkpoint" or "checkpoint" in thread_wait.phases) and not (
        thread_wait.phases & {"cleanup", "error"} or thread_wait.kind in ("stopped", "prompt")
    )
