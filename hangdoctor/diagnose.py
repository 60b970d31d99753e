"""Turn a snapshot into a diagnosis: apply every rule, prefer the most certain verdict, keep the
others.

    Snapshot -> build_case -> wait_for_graph -> rules -> Verdicts -> Diagnosis
"""

import re
from dataclasses import replace

from hangdoctor.case import Case, Process, build_case
from hangdoctor.frames import show, without_garbage_collection
from hangdoctor.graph import Graph, StackClass, rank_ranges, stack_classes, wait_for_graph
from hangdoctor.model import Alternative, Diagnosis, Evidence, Group, NextStep, Rank, RankVerdict, Snapshot
from hangdoctor.recorded_operations import behind_by_ras
from hangdoctor.rules.ended import end_evidence, ended_otherwise
from hangdoctor.rules.order import RULES
from hangdoctor.rules.progress import to_collect
from hangdoctor.rules.verdict import LEVELS, Verdict, behind_by_steps, operation, steps_of

MAX_GROUPS = 64
MAX_EDGES = 6
BACKEND = re.compile(r"(?i)nccl|gloo")
OF_GPUS = re.compile(r"(?i)nccl|xid|nvidia|cuda|all_reduce_perf")


@without_garbage_collection()
def diagnose(snapshot: Snapshot) -> Diagnosis:
    """Return the class of a hang, its culprits and the evidence.

    Pure: it reads nothing but the snapshot.
    """
    case = build_case(snapshot)
    graph = wait_for_graph(case)
    verdicts = [weighed(verdict, case) for rule in RULES if (verdict := rule(case, graph)) is not None]
    if (otherwise := ended_otherwise(case, graph)) is not None:
        verdicts = [otherwise]
    if not snapshot.complete:  # a rank that wrote nothing may be the one that the others wait for
        verdicts = [v if v.confidence == "high" else replace(v, confidence="low") for v in verdicts]
    # Sorting is stable: among equally certain verdicts the order of the rules decides.
    # `unknown` comes last.
    first, *rest = sorted(verdicts, key=lambda v: (v.label == "unknown", -LEVELS.index(v.confidence)))
    first = blamed_elsewhere(case, first)
    classes = stack_classes(case.ranks)
    behind, fact = behind_by_steps(case)
    return Diagnosis(
        label=first.label,
        confidence=first.confidence,
        culprit_ranks=first.culprits,
        victim_ranks=victims(first, graph),
        summary=" ".join([first.summary, *(n for n in snapshot.notes if n.startswith("Ranks are"))]),
        evidence=first.evidence
        + end_evidence(case)
        + ((Evidence(rank_ranges(behind), fact),) if behind else ())
        + (waits(graph) if first.culprits else ())
        + notes(snapshot),
        next_steps=advice(first, snapshot) + reproduction(first, classes),
        would_refute=first.would_refute,
        alternatives=tuple(
            Alternative(v.label, v.confidence, v.culprits, v.summary) for v in rest if v.label != "unknown"
        ),
        groups=tuple(group_of(c) for c in classes[:MAX_GROUPS]),
        ranks=rank_map(case, graph, first, classes),
        collect=to_collect(case) if first.label == "unknown" or first.confidence == "low" else (),
        kind=first.kind,
    )


def advice(verdict: Verdict, snapshot: Snapshot) -> tuple[NextStep, ...]:
    """Return the next steps; a job on gloo has no use for those of NCCL and of GPUs."""
    frames = (f.function for d in snapshot.dumps for t in d.threads for f in t.frames if f.native)
    words = (*(line for log in snapshot.logs for line in log.lines), *(e.words for e in snapshot.endings))
    seen = {d.facts.backend for d in snapshot.dumps} - {None}
    seen = seen or {m[0].lower() for text in (*frames, *words) for m in BACKEND.finditer(text)}
    if seen != {"gloo"}:
        return verdict.next_steps
    own = steps_of(verdict.label, "gloo") if verdict.label == "nccl_timeout" else ()
    return own + tuple(step for step in verdict.next_steps if not OF_GPUS.search(step.do))


def unsettled(snapshot: Snapshot) -> bool:
    """True if ranks of a live job wait for others and came there since the sample before: a later
    sample shows whether they continue.
    """
    graph = wait_for_graph(build_case(snapshot))
    return any(s.moved or s.arrived for s in graph.waiting_ranks)


def blamed_elsewhere(case: Case, verdict: Verdict) -> Verdict:
    """Replace `external_wait` where the ranks of another role (an engine, a reward service) hang
    themselves: the rank that waits for them is a victim.
    """
    if verdict.label != "external_wait":
        return verdict
    for role in sorted({s.role for s in case.others} - {"child", "launcher"}):
        theirs = tuple(s for s in case.others if s.role == role and s.threads)
        part = replace(case, role=role, ranks=theirs, others=(), missing={}, findings=())
        graph = wait_for_graph(part)
        found = [v for rule in RULES if (v := rule(part, graph)) is not None]
        surest = min(found, key=lambda v: -LEVELS.index(v.confidence))
        if (
            surest.label not in ("unknown", "straggler_or_not_hung", "external_wait")
            and surest.confidence != "low"
        ):
            summary = f"{surest.summary} {verdict.summary}"
            return replace(surest, summary=summary, evidence=surest.evidence + verdict.evidence)
    return verdict


def weighed(verdict: Verdict, case: Case) -> Verdict:
    """Weigh a verdict from stacks against the records: agreement raises its confidence,
    contradiction is reported and lowers it.
    """
    behind, finding = recorded_behind(case)
    blamed = set(verdict.culprits)
    if not behind or not blamed or not case.ranks or verdict.label in ("collective_mismatch", "unknown"):
        return verdict
    agrees = blamed == set(behind)
    level = LEVELS.index(verdict.confidence)
    if agrees:
        # A rank that computes is behind as well: agreement does not make it a hang.
        level, fact = min(level + 1, 2) if level else 0, f"agrees with the stacks: {finding}"
    elif blamed.isdisjoint(behind):
        level, fact = max(level - 1, 0), f"contradicts the stacks: {finding}"
    else:
        fact = finding
    evidence = Evidence(rank_ranges(behind), fact)
    return replace(verdict, confidence=LEVELS[level], evidence=(*verdict.evidence, evidence))


def recorded_behind(case: Case) -> tuple[tuple[int, ...], str]:
    """Return the ranks that Flight Recorder, or else RAS, reports as behind, and the finding as
    text.
    """
    for finding in case.findings:
        if finding.kind == "behind":
            return finding.odd_ranks, f"{finding.source}, group {finding.group}: {finding.detail}"
    return behind_by_ras(case.snapshot.ras)


def reproduction(verdict: Verdict, classes: tuple[StackClass, ...]) -> tuple[NextStep, ...]:
    """Return the smallest job that keeps the pattern: one rank of each place where ranks wait."""
    if verdict.label in ("nccl_timeout", "straggler_or_not_hung", "unknown") or not 2 <= len(classes) <= 8:
        return ()
    alike = ", one like ".join(f"rank {c.ranks[0]}" for c in classes if c.ranks)
    why = f"{len(classes)} ranks are enough to reproduce it: one that behaves like {alike}"
    return (NextStep(f"torchrun --nproc-per-node {len(classes)} ...", why),)


def victims(verdict: Verdict, graph: Graph) -> tuple[Rank, ...]:
    """Return the ranks that wait for others and are not to blame; none where nothing hangs."""
    if verdict.label == "straggler_or_not_hung" and not verdict.culprits:
        return ()
    blamed = set(verdict.culprits)
    elsewhere = bool(blamed) and all(isinstance(rank, str) for rank in blamed)
    waiting = graph.waiting_ranks + (graph.source_ranks if elsewhere else ())
    return tuple(
        sorted(
            (s.rank for s in waiting if s.rank is not None and s.rank not in blamed),
            key=lambda rank: (isinstance(rank, str), rank),
        )
    )


def waits(graph: Graph) -> tuple[Evidence, ...]:
    """Return the wait-for graph edge by edge where it leads to a source; in a cycle all edges are
    alike.
    """
    edges = graph.edges[:MAX_EDGES] if graph.sources else ()
    return tuple(Evidence(edge.source, f"waits for {edge.target}, which {edge.reason}") for edge in edges)


def notes(snapshot: Snapshot) -> tuple[Evidence, ...]:
    """Return notes about the input itself (files not read, hosts not reached)."""
    shown = snapshot.notes[:5]
    more = len(snapshot.notes) - len(shown)
    return tuple(Evidence("", note) for note in (*shown, *([f"and {more} more notes"] if more > 0 else [])))


def group_of(stack_class: StackClass) -> Group:
    first = stack_class.members[0]
    return Group(
        ranks=rank_ranges(stack_class.ranks),
        size=len(stack_class.members),
        waits_for=first.wait.kind,
        doing=operation(first),
        stack=tuple(show(frame) for frame in stack_class.frames[:200]),
    )


def rank_map(
    case: Case, graph: Graph, verdict: Verdict, classes: tuple[StackClass, ...]
) -> tuple[RankVerdict, ...]:
    group_number = {m.name: i for i, c in enumerate(classes) for m in c.members}
    waiting = {s.name for s in graph.waiting_ranks}
    blamed = set(verdict.culprits)
    cells = [
        RankVerdict(
            s.rank,
            part_of(s, blamed, waiting),
            s.status,
            group_number[s.name],
            operation(s),
            s.pid,
            s.host,
            s.command,
            s.facts.start_time,
        )
        for s in case.ranks
        if s.rank is not None
    ]
    for rank, status in case.missing.items():
        absent = "not_collected" if status == "not_collected" else "missing"  # nobody looked for the former
        part = "culprit" if rank in blamed else absent
        cells.append(RankVerdict(rank, part, status, None, status.replace("_", " ")))
    return tuple(sorted(cells, key=lambda cell: (isinstance(cell.rank, str), cell.rank)))


def part_of(process: Process, blamed: set[Rank], waiting: set[str]) -> str:
    """Return the part of a rank in the hang: culprit, victim, running or other."""
    if process.rank in blamed:
        return "culprit"
    if process.name in waiting and not process.moved:
        return "victim"
    return "running" if process.moved or process.busy else "other"
