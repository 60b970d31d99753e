"""Rules for ranks that all wait for peers: in different collectives, or in send and receive."""

from hangdoctor.case import Case, Process
from hangdoctor.graph import Cluster, Graph, common_prefix, rank_ranges, same_place
from hangdoctor.model import CollectiveRecord, Confidence, Evidence
from hangdoctor.parse.logs import LOGGED, completed_by_others, first_match
from hangdoctor.recorded_operations import OperationFinding
from hangdoctor.rules.progress import asking, waits_for_requests
from hangdoctor.rules.verdict import (
    Verdict,
    apart,
    apart_evidence,
    begin,
    behind_by_steps,
    confidence,
    make_verdict,
    name_ranks,
    place,
    plural,
    ranks_text,
    stack_evidence,
    stillness,
    wait_in,
    waiting_evidence,
)
from hangdoctor.tables import message

Ranks = tuple[Process, ...]
MISMATCH_LOG = message("together", "mismatch_log")


def collective_mismatch(case: Case, graph: Graph) -> Verdict | None:
    recorded = next((f for f in case.findings if f.kind in ("operation", "dtype", "size")), None)
    if recorded is not None:
        return from_records(case, graph, recorded)
    if not case.ranks and (found := named_by_nccl(case) or in_other_order(case)):
        return found
    if (
        not case.lost
        and case.ranks
        and all(map(waits_for_requests, case.ranks))
        and (found := lost_reply(case))
    ):
        return found
    idle = graph.source_ranks or tuple(filter(waits_for_requests, graph.waiting_ranks))
    running = tuple(s for s in graph.waiting_ranks if s not in idle and not waits_for_requests(s))
    if not case.lost and running and idle and all(map(waits_for_requests, idle)):
        return out_of_step(case, graph, idle, running)
    if graph.sources or case.lost or not graph.waiting:
        return None
    if same_place(graph.waiting):
        return of_two_steps(case, graph)
    if any(s.wait.operation == "new_group" for s in graph.waiting_ranks):
        return None  # group creation belongs to init_deadlock
    clusters = [c for c in graph.waiting if c.wait.kind != "device"]
    odd = odd_ones(clusters)
    if len(odd) > 1 and several_groups(clusters):  # one rank ahead of all others has left something out
        odd = behind_in_program(clusters) or odd
    behind = next((f for f in case.findings if f.kind == "behind"), None)
    if behind is not None:
        odd = [s for s in graph.waiting_ranks if s.rank in behind.odd_ranks] or odd
    return make_verdict(
        "collective_mismatch",
        confidence(case, graph, odd, certainty(clusters, odd, behind is not None)),
        odd,
        f"{apart(graph, odd)}.",
        apart_evidence(graph, odd)
        + (record_evidence(behind) if behind else ())
        + waiting_evidence(graph, odd)
        + stillness(case),
    )


def of_two_steps(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict for ranks at one place in different steps, by their logs: some left out a
    collective, or called one more.
    """
    behind, fact = behind_by_steps(case)
    if not behind:
        return None
    where = f"{wait_in(graph.waiting_ranks)} at {place(graph.waiting_ranks[0])}"
    return make_verdict(
        "collective_mismatch",
        confidence(case, graph, graph.waiting_ranks, "medium"),
        [s for s in graph.waiting_ranks if s.rank in case.snapshot.steps],
        f"{begin(where)}, but in different steps: {ranks_text(behind)} {fact}.",
        waiting_evidence(graph) + stillness(case),
        "two_steps",
    )


def out_of_step(case: Case, graph: Graph, idle: Ranks, running: Ranks) -> Verdict:
    """Return the verdict for an engine of which some ranks run a step and others wait for one."""
    odd = running if len(running) <= len(idle) else idle
    return make_verdict(
        "collective_mismatch",
        confidence(case, graph, odd, "medium"),
        odd,
        f"{begin(wait_in(running))} of a step, while {name_ranks(idle)} {plural(idle, 'waits', 'wait')} for "
        "the next request: the engine's ranks are out of step.",
        waiting_evidence(graph) + stack_evidence(idle[:4], "waits for a request") + stillness(case),
        "engine",
    )


def lost_reply(case: Case) -> Verdict | None:
    """Return the verdict for an engine that waits for its workers, which wait for its next call."""
    waiting = asking(case)
    if not waiting:
        return None
    return make_verdict(
        "collective_mismatch",
        "medium",
        (),
        f"The engine waits for a reply to a step at {place(waiting[0])}, and {wait_in(case.ranks)} for the next "
        "request: a message between them was lost.",
        stack_evidence(waiting[:1], "waits for a reply")
        + stack_evidence(case.ranks[:4], "waits for a request")
        + stillness(case),
        "engine",
    )


def odd_ones(clusters: list[Cluster]) -> list[Process]:
    """Return the ranks outside the largest cluster; all of them where no cluster is the largest."""
    largest = len(clusters[0].members)
    if sum(1 for c in clusters if len(c.members) == largest) > 1:
        return [s for c in clusters if len(c.members) == largest for s in c.members]
    return [s for c in clusters[1:] for s in c.members]


def several_groups(clusters: list[Cluster]) -> bool:
    """True if libraries of several parallel dimensions wait: groups may correctly wait for others."""
    domains = {c.wait.domain for c in clusters}
    return bool(domains & {"tensor", "pipeline", "expert", "context"}) and len(domains) > 1


def behind_in_program(clusters: list[Cluster]) -> list[Process]:
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


def certainty(clusters: list[Cluster], odd: list[Process], recorded: bool) -> Confidence:
    """Return high only for one rank against all others: several could be a sub-group that is stuck
    by itself.
    """
    if recorded:
        return "high"
    # A collective of a clean-up or an error path is no mismatch of the program.
    if any(c.wait.phases & {"cleanup", "error"} for c in clusters) or several_groups(clusters):
        return "low"
    return "high" if len(odd) == 1 and len(clusters) == 2 and len(clusters[0].members) > 1 else "medium"


def from_records(case: Case, graph: Graph, finding: OperationFinding) -> Verdict:
    """Return the verdict for recorded operations that contradict each other, which needs no
    assumption about groups; stacks show where the odd ranks are. Two ranks of several have no majority.
    """
    odd = [s for s in case.ranks if s.rank in finding.odd_ranks]
    where = f"; {name_ranks(odd[:1])} is at {place(odd[0])}" if odd and odd[0].wait.frames else ""
    elsewhere = any(s.rank not in finding.odd_ranks for s in graph.source_ranks)
    others = sorted(set(finding.agreeing_ranks) - set(finding.odd_ranks))
    who = " and ".join(ranks_text(found) for found in (finding.odd_ranks, others) if found)
    return make_verdict(
        "collective_mismatch",
        # A watchdog message numbers the operations of one group and seldom names the group.
        "medium" if elsewhere or finding.source in LOGGED or (case.missing and not others) else "high",
        finding.odd_ranks,
        f"{begin(who)} disagree on the {finding.kind} of {collective_of(finding)}: {finding.detail}{where}.",
        record_evidence(finding) + stack_evidence(odd, "is here", graph) + stillness(case),
        "records",
    )


def named_by_nccl(case: Case) -> Verdict | None:
    """Return the verdict for NCCL's own report that ranks called different collectives."""
    found = first_match(case.snapshot.logs, MISMATCH_LOG)
    if found is None:
        return None
    log, match = found
    rank = int(match["rank"][:7])
    return make_verdict(
        "collective_mismatch",
        "medium",
        (rank,),
        f"NCCL reports different collectives at and around rank {rank}.",
        (Evidence(str(rank), match.string.strip()[:200], log.name),),
        "records",
    )


def in_other_order(case: Case) -> Verdict | None:
    """Return the verdict for a collective in which one rank waits and which another has completed."""
    found = completed_by_others(case.snapshot.logs)
    if found is None:
        return None
    rank, number, others = found
    who = f"{ranks_text(others)} {plural(others, 'has', 'have')} completed"
    return make_verdict(
        "collective_mismatch",
        "medium",
        (rank, *others) if len(others) == 1 else (rank,),
        f"Rank {rank} waits in collective {number} of its group, and {who} a collective of that number: they call "
        "collectives in different orders.",
        (Evidence(str(rank), f"timed out in number {number}, {ranks_text(others)} completed it"),),
        "records",
    )


def collective_of(finding: OperationFinding) -> str:
    """Return number and group of the collective; some records have no number."""
    number = f"collective {finding.sequence}" if finding.sequence else "a collective"
    return f"{number} of group {finding.group}"


def record_evidence(finding: OperationFinding) -> tuple[Evidence, ...]:
    fact = f"{finding.source}, {collective_of(finding)}: {finding.detail}"
    return (Evidence(rank_ranges(finding.odd_ranks), fact, frame=finding.operation),)


def p2p_shape_mismatch(case: Case, graph: Graph) -> Verdict | None:
    if graph.sources or case.lost:
        return None
    if not case.ranks:
        return other_sizes(case)
    peers = [s for s in graph.waiting_ranks if s.wait.kind == "p2p"]
    pipeline = any(s.wait.domain == "pipeline" for s in peers)
    if not peers or (len(peers) < 2 and not pipeline and len(case.ranks) > 1):
        return None
    others = [c for c in graph.waiting if c.wait.kind not in ("p2p", "device")]
    if len(others) > 1 or len(peers) * 2 < len(case.ranks):
        return None  # stages wait behind ranks that disagree on a collective
    read = "that was read " if case.not_collected else ""
    return make_verdict(
        "p2p_shape_mismatch",
        confidence(case, graph, peers, "high" if len(peers) == len(case.ranks) else "low"),
        peers,
        f"{apart(graph, peers)}: no rank {read}is on the other side.",
        apart_evidence(graph, peers) + stillness(case),
    )


def other_sizes(case: Case) -> Verdict | None:
    """Return the verdict for a send and a receive of one number in one group whose sizes differ."""
    calls: dict[tuple[str, int], dict[str, CollectiveRecord]] = {}
    for record in case.snapshot.records:
        if record.is_p2p and record.group != "default":
            calls.setdefault((record.group, record.sequence), {})[record.operation] = record
    for (group, number), both in calls.items():
        sent, received = both.get("send"), both.get("recv")
        if sent and received and sent.input_sizes != received.input_sizes:
            fact = f"rank {sent.rank} sends {sent.input_sizes[0][0]} elements, rank {received.rank} expects "
            fact += f"{received.input_sizes[0][0]}: operation {number} of group {group}"
            ranks = (sent.rank, received.rank)
            shown = Evidence(rank_ranges(sorted(ranks)), fact)
            return make_verdict("p2p_shape_mismatch", "medium", ranks, f"{begin(fact)}.", (shown,))
    return None
