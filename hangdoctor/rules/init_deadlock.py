"""The job is stuck before its first step: in rendezvous, group creation or model building.

What it looks like: ranks wait in init_process_group, the store, new_group or
DistributedDataParallel's first check, and one rank has not arrived: it imports, waits for a lock of
an extension build, or loads weights. Or one rank creates a group that the others do not create. Or
no rank can reach the store at all.

Common causes: a stale lock file of torch_extensions, a slow or dead file system with the model
files, `if rank == 0: new_group(...)` (every rank of the job must call it), a wrong MASTER_ADDR, a
launcher that died with the store inside it (TORCHELASTIC_USE_AGENT_STORE), a firewall between
nodes.
"""

from hangdoctor.case import Case, ProcessState
from hangdoctor.graph import Graph
from hangdoctor.model import Confidence
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

STEPS = (
    step(
        "export TORCH_CPP_LOG_LEVEL=INFO TORCH_DISTRIBUTED_DEBUG=INFO",
        "the store logs who connected",
        "more log lines",
    ),
    step(
        "ls -l ~/.cache/torch_extensions/*/*/lock",
        "a lock file older than the job is stale and can be removed",
    ),
    step("nc -vz $MASTER_ADDR $MASTER_PORT", "checks that this node can reach the store"),
)


def judge(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict if the pattern is present, else None."""
    if case.lost:
        return None
    waiters, sources = graph.waiting_ranks, graph.source_ranks
    starting = [s for s in waiters if starts(s)]
    late = [s for s in sources if not s.thread_wait.phases & {"cleanup", "error"}]
    if starting and len(starting) == len(waiters) and late:
        return verdict(case, graph, late, f"has not reached {operation(starting[0])}")
    loading = [s for s in late if s.thread_wait.kind in ("import", "load")]
    if loading and waiters and len(loading) == len(sources):
        return verdict(case, graph, loading, f"is still in {loading[0].thread_wait.operation}", "medium")
    if sources or not starting:
        return None
    if len(starting) == len(waiters):
        return together(case, graph, starting)
    if len(starting) * 2 <= len(waiters) or all(s.thread_wait.kind == "store" for s in starting):
        return verdict(
            case, graph, starting, f"is in {operation(starting[0])}, which every rank must call", "high"
        )
    return None


def starts(process_state: ProcessState) -> bool:
    """True if a wait belongs to the start of the job."""
    return process_state.thread_wait.kind == "store" or "init" in process_state.thread_wait.phases


def together(case: Case, graph: Graph, starting: list[ProcessState]) -> Verdict | None:
    """Return the verdict when every rank is in the start-up: at different places some are culprits,
    at one place none is.
    """
    if len(graph.waiting) > 1:
        odd = [s for cluster in graph.waiting[1:] for s in cluster.members]
        tie = len(graph.waiting[0].members) == len(graph.waiting[1].members)
        return verdict(case, graph, starting if tie else odd, "is at another place of the start-up", "medium")
    return Verdict(
        "init_deadlock",
        confidence(case, graph, starting, "high" if starting[0].thread_wait.kind == "store" else "medium"),
        (),
        f"All {len(starting)} ranks wait in {operation(starting[0])} at {place(starting[0])}: "
        "the cause is outside these ranks (the store's host, the network, a rank that was never started).",
        waiting_evidence(graph) + stillness(case),
        (STEPS[2], STEPS[0]),
        ("A rank that has finished init_process_group.", "A store that responds on MASTER_ADDR:MASTER_PORT."),
    )


def verdict(
    case: Case, graph: Graph, culprits: list[ProcessState], fact: str, best: Confidence = "high"
) -> Verdict:
    """Return the verdict that blames `culprits`, with `fact` in the summary and the evidence."""
    peers = [s for s in graph.waiting_ranks if s not in culprits]
    others = (
        f"; {name_ranks(peers)} {plural(peers, 'waits', 'wait')} in {operation(peers[0])}" if peers else ""
    )
    return Verdict(
        "init_deadlock",
        confidence(case, graph, culprits, best),
        ranks_of(culprits),
        f"{begin(name_ranks(culprits))} {fact}: it is at {place(culprits[0])}{others}.",
        stack_evidence(culprits, fact, graph) + waiting_evidence(graph, culprits) + stillness(case),
        STEPS,
        (
            "The culprit reaches the call its peers wait in within a few minutes: then it was only slow to start.",
        ),
    )
