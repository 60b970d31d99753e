"""All ranks of the group wait in the same collective, called from the same place.

What it looks like: eight of eight stacks are equal and end in one all_reduce (or in the
synchronisation behind it), and no rank is missing. The program is not the cause: every rank
arrived. Check what carries the collective.

Common causes: a network link or switch, a wrong interface (NCCL_SOCKET_IFNAME), a firewall between
nodes, InfiniBand or EFA failures, a GPU that fell off the bus (dmesg: Xid), a driver, shared memory
or peer-to-peer failures inside one node.

No rank can be blamed by its stack. Flight Recorder or NCCL RAS may still identify one that has
enqueued less than the others.
"""

from hangdoctor.case import Case
from hangdoctor.graph import Graph, same_place
from hangdoctor.groups import rank_ranges
from hangdoctor.model import Confidence, Evidence, Rank
from hangdoctor.parse.logs import watchdog_timeouts
from hangdoctor.recorded_operations import behind_by_ras
from hangdoctor.rules.verdict import Verdict, confidence, operation, place, step, stillness, waiting_evidence

STEPS = (
    step("dmesg -T | grep -i -E 'xid|nvrm|link'", "GPU and link errors of this node"),
    step(
        "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET",
        "shows which interfaces and transports NCCL chose",
        "more log lines",
    ),
    step("ncclras -v", "NCCL 2.24 and later: which rank has launched less, or does not respond"),
    step(
        "all_reduce_perf -b 8 -e 128M -f 2 -g 8",
        "nccl-tests on the same nodes, halved until the bad one is found",
        "needs the nodes for minutes",
    ),
)


def judge(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict if the pattern is present, else None."""
    if not case.ranks:
        return from_records(case)
    if graph.sources or case.lost or len(graph.waiting_ranks) < 2 or not same_place(graph.waiting):
        return None
    first = next((c.members[0] for c in graph.waiting if c.thread_wait.kind != "device"), None)
    if first is not None and first.thread_wait.kind not in ("collective", "backward"):
        return None
    process_state = first or graph.waiting[0].members[0]
    culprits, found = recorded(case)
    # Equal stacks may still belong to different steps: only records make it certain.
    agreed = any(finding.kind == "same" for finding in case.findings)
    best: Confidence = "high" if first and agreed else "medium"
    if process_state.thread_wait.kind == "backward":
        best = "low"
    if first is not None and any(c.thread_wait.kind == "device" for c in graph.waiting):
        best = "low"  # some wait for the device, which may run another collective than the others
    if case.missing:  # a gap in the numbers: a rank that was not saved may be elsewhere
        best = "medium" if best == "high" else "low"
    return Verdict(
        "nccl_timeout",
        confidence(case, graph, graph.waiting_ranks, best),
        culprits,
        f"All {len(case.ranks)} ranks wait in {operation(process_state)} at {place(process_state)}: every rank reached it, "
        "so check the network, the driver and the devices.",
        waiting_evidence(graph) + found + stillness(case),
        STEPS,
        (
            "A rank of the group that is not among these dumps and is elsewhere.",
            "Flight Recorder numbers that differ between the ranks: then they are not in the same collective.",
        ),
    )


def from_records(case: Case) -> Verdict | None:
    """Return the verdict without stacks, where every rank's record ends in the same unfinished
    collective.
    """
    findings = case.findings
    if not findings or any(finding.kind != "same" for finding in findings):
        return None
    finding = findings[0]
    return Verdict(
        "nccl_timeout",
        "medium",
        (),
        f"Flight Recorder: {finding.detail} of group {finding.group}, and it has not completed.",
        (
            Evidence(
                rank_ranges(finding.agreeing_ranks),
                f"Flight Recorder, group {finding.group}: {finding.detail}",
            ),
        ),
        STEPS,
        ("A rank of that group whose record is missing.",),
    )


def recorded(case: Case) -> tuple[tuple[Rank, ...], tuple[Evidence, ...]]:
    """Return the ranks that records, RAS or watchdog messages report as behind, with the findings
    as evidence.
    """
    found: list[Evidence] = []
    behind: tuple[int, ...] = ()
    for finding in case.findings:
        found.append(
            Evidence(
                rank_ranges(finding.odd_ranks), f"Flight Recorder, group {finding.group}: {finding.detail}"
            )
        )
        behind = behind or (finding.odd_ranks if finding.kind == "behind" else ())
    ras, fact = behind_by_ras(case.snapshot.ras)
    if ras:
        found.append(Evidence(rank_ranges(ras), fact))
    for log in case.snapshot.logs[:1000]:
        for rank, sequence, name in watchdog_timeouts(log)[:2]:
            found.append(Evidence(str(rank), f"its watchdog timed out on {name} number {sequence}", log.name))
    return behind or ras, tuple(found[:8])
