"""Ranks of one group wait in different collectives, or in one reached from different places.

The places may be lines of the program or different steps.

What it looks like: every rank is in a collective, but not in the same one: rank 2 in all_gather
where the others are in broadcast, or all in all_reduce, one of them called from the logger. Flight
Recorder shows the same sequence number of the group with different operations or sizes.

Common causes: `if rank == 0:` around something that communicates (logging, evaluation, sampling
from a sharded model, saving); data loaders of different length; control flow that depends on local
data; two collectives in a different order; a skipped layer or expert whose gradients need a
reduction.

Ranks in two different sub-groups (tensor, pipeline, expert, data) may correctly be in different
collectives: one group waits for a rank that waits in the other. So without a record of the groups
the confidence stays low.
"""

from hangdoctor.case import Case, ProcessState
from hangdoctor.graph import Cluster, Graph, same_place
from hangdoctor.groups import common_prefix, rank_ranges
from hangdoctor.model import Confidence, Evidence
from hangdoctor.recorded_operations import OperationFinding
from hangdoctor.rules.straggler_or_not_hung import waits_for_requests
from hangdoctor.rules.verdict import (
    Verdict,
    apart,
    apart_evidence,
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
        "TORCH_FR_BUFFER_SIZE=2000",
        "Flight Recorder numbers every collective of every group",
        "a few MB, under 1 % of time",
    ),
    step(
        "TORCH_DISTRIBUTED_DEBUG=DETAIL",
        "checks each collective before it runs and raises where ranks differ",
        "slow: for a short run only",
    ),
)
REFUTE = (
    "The ranks belong to different groups (tensor, pipeline, expert): then both waits may be correct and the cause is elsewhere.",
    "A later sample in which one of the groups has made progress.",
)


def judge(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict if the pattern is present, else None."""
    recorded = next((f for f in case.findings if f.kind in ("operation", "dtype", "size")), None)
    if recorded is not None:
        return from_records(case, graph, recorded)
    if not case.lost and graph.waiting and graph.sources and all(map(waits_for_requests, graph.source_ranks)):
        return out_of_step(case, graph)
    if graph.sources or case.lost or not graph.waiting or same_place(graph.waiting):
        return None
    if any(s.thread_wait.operation == "new_group" for s in graph.waiting_ranks):
        return None  # group creation belongs to init_deadlock
    named_clusters = [c for c in graph.waiting if c.thread_wait.kind != "device"]
    several = several_groups(named_clusters)
    odd = (behind_in_program(named_clusters) if several else []) or odd_ones(named_clusters)
    behind = next((f for f in case.findings if f.kind == "behind"), None)
    if behind is not None:
        odd = [s for s in graph.waiting_ranks if s.rank in behind.odd_ranks] or odd
    best = certainty(named_clusters, odd, behind is not None)
    return Verdict(
        "collective_mismatch",
        confidence(case, graph, odd, best),
        ranks_of(odd),
        f"{apart(graph, odd)}.",
        apart_evidence(graph, odd)
        + (record_evidence(behind) if behind else ())
        + waiting_evidence(graph, odd)
        + stillness(case),
        STEPS,
        REFUTE,
    )


def out_of_step(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict for an engine of which some ranks run a step and others wait for one."""
    if all(map(waits_for_requests, graph.waiting_ranks)):
        return None  # an idle engine: one rank polls, the others wait for its broadcast
    odd = list(
        graph.waiting_ranks if len(graph.waiting_ranks) <= len(graph.source_ranks) else graph.source_ranks
    )
    return Verdict(
        "collective_mismatch",
        confidence(case, graph, odd, "medium"),
        ranks_of(odd),
        f"{begin(name_ranks(graph.waiting_ranks))} {plural(graph.waiting_ranks, 'waits', 'wait')} in "
        f"{operation(graph.waiting_ranks[0])} of a step, while {name_ranks(graph.source_ranks)} "
        f"{plural(graph.source_ranks, 'waits', 'wait')} for the next request: the engine's ranks are out of step.",
        waiting_evidence(graph)
        + stack_evidence(graph.source_ranks[:4], "waits for a request")
        + stillness(case),
        STEPS,
        REFUTE[1:],
    )


def odd_ones(clusters: list[Cluster]) -> list[ProcessState]:
    """Return the ranks outside the largest cluster; all of them where no cluster is the largest."""
    largest = len(clusters[0].members)
    if sum(1 for c in clusters if len(c.members) == largest) > 1:
        return [s for c in clusters if len(c.members) == largest for s in c.members]
    return [s for c in clusters[1:] for s in c.members]


def several_groups(clusters: list[Cluster]) -> bool:
    """True if libraries of different parallel dimensions wait: one group may correctly wait for a
    rank of another.
    """
    domains = {c.thread_wait.domain for c in clusters}
    return bool(domains & {"tensor", "pipeline", "expert", "context"}) and len(domains) > 1


def behind_in_program(clusters: list[Cluster]) -> list[ProcessState]:
    """Return the ranks at the earliest line of the function in which the call paths diverge: with
    several groups they block the others.
    """
    paths = [tuple(reversed(c.path)) for c in clusters]
    depth = common_prefix([c.path for c in clusters])
    forks = [path[depth] for path in paths if depth < len(path)]
    if len(forks) < len(clusters) or len({(f.function, f.file) for f in forks}) > 1:
        return []
    first = min(fork.line for fork in forks)
    return [s for c, fork in zip(clusters, forks, strict=True) if fork.line == first for s in c.members]


def certainty(clusters: list[Cluster], odd: list[ProcessState], recorded: bool) -> Confidence:
    """Return high only for one rank against all others: several could be a sub-group that is stuck
    by itself.
    """
    if recorded:
        return "high"
    # A collective of a clean-up or an error path is no mismatch of the program.
    apart = any(c.thread_wait.phases & {"cleanup", "error"} for c in clusters)
    if apart or several_groups(clusters):
        return "low"
    return "high" if len(odd) == 1 and len(clusters) == 2 and len(clusters[0].members) > 1 else "medium"


def from_records(case: Case, graph: Graph, finding: OperationFinding) -> Verdict:
    """Return the verdict for recorded operations that contradict each other, which needs no
    assumption about groups; stacks show where the odd ranks are.
    """
    odd = [s for s in case.ranks if s.rank in finding.odd_ranks]
    where = f" at {place(odd[0])}" if odd and odd[0].thread_wait.frames else ""
    apart = [s for s in graph.source_ranks if s.rank not in finding.odd_ranks]
    return Verdict(
        "collective_mismatch",
        # A watchdog message numbers the operations of one group and seldom names the group.
        "medium" if apart or finding.source == "watchdog" else "high",
        finding.odd_ranks,
        f"Ranks {rank_ranges(finding.odd_ranks)} and {rank_ranges(finding.agreeing_ranks)} disagree on the {finding.kind} of collective "
        f"{finding.sequence} of group {finding.group}: {finding.detail}{where}.",
        record_evidence(finding) + stack_evidence(odd, "is here", graph) + stillness(case),
        STEPS[1:],
        (
            "Records that were taken at different times, or ring buffers too small to contain the same collectives.",
            *REFUTE[1:],
        ),
    )


def record_evidence(finding: OperationFinding) -> tuple[Evidence, ...]:
    fact = f"{finding.source}, group {finding.group}, collective {finding.sequence}: {finding.detail}"
    return (Evidence(rank_ranges(finding.odd_ranks), fact, frame=finding.operation),)
