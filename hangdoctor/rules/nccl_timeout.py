"""All ranks of the group wait in the same collective, called from the same place.

What it looks like: eight of eight stacks are equal and end in one all_reduce (or in the
synchronisation behind it), and no rank is missing. The program is not the cause: every rank
arrived. Check what carries the collective.

Common causes: a network link or switch, a wrong interface (NCCL_SOCKET_IFNAME), a firewall between
nodes, InfiniBand or EFA failures, a GPU that fell off the bus (dmesg: Xid), a driver, shared memory
or peer-to-peer failures inside one node.

No rank can be blamed by its stack. Flight Recorder or NCCL RAS may still identify one that has
enqueued less than the others. Native frames, records, RAS and logs may show the kind:
`stuck_in_launch` (a rank is inside the call that gives the kernel to the device), `transport` (the
kernel runs everywhere and receives nothing) or `device` (a device failed).
"""

import re

from hangdoctor.case import Case, ProcessState
from hangdoctor.graph import Graph, same_place
from hangdoctor.groups import rank_ranges
from hangdoctor.model import Confidence, Evidence, NextStep, Rank
from hangdoctor.nccl_kinds import Found, kind_of
from hangdoctor.parse.logs import watchdog_timeouts
from hangdoctor.recorded_operations import behind_by_ras
from hangdoctor.rules.verdict import (
    Verdict,
    confidence,
    name_ranks,
    operation,
    place,
    plural,
    step,
    stillness,
    waiting_evidence,
)

# Code that synchronises with the device because messages to other ranks are under way.
TRANSFER = re.compile(r"nccl|p2p|batch_isend|transfer_stream|communicat", re.IGNORECASE)
STEPS_OF_KIND: dict[str, tuple[NextStep, ...]] = {
    "stuck_in_launch": (
        step(
            "CUDA_MODULE_LOADING=EAGER",
            "loads kernels before the first step: lazy loading can wait for a kernel that waits for peers",
            "slower start",
        ),
        step(
            "py-spy dump --native --pid PID",
            "of the rank that launches: the call it is inside",
            "pauses it briefly",
        ),
    ),
    "transport": (),
    "device": (step("nvidia-smi -q -d ECC,PERFORMANCE", "errors and throttling of the device"),),
}

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
    if graph.sources or case.lost or not graph.waiting or not same_place(graph.waiting):
        return None
    first = next((c.members[0] for c in graph.waiting if c.thread_wait.kind != "device"), None)
    if len(graph.waiting_ranks) < 2 and not (case.snapshot.expected and communicates(graph.waiting_ranks[0])):
        return None
    if first is not None and first.thread_wait.kind not in ("collective", "backward"):
        return None
    process_state = first or graph.waiting[0].members[0]
    culprits, found = recorded(case)
    kind = kind_of(case)
    return Verdict(
        "nccl_timeout",
        confidence(case, graph, graph.waiting_ranks, certainty(case, graph, first)),
        culprits or (kind.ranks if kind else ()),
        summary(case, process_state, kind),
        waiting_evidence(graph) + found + (kind.evidence if kind else ()) + stillness(case),
        (STEPS_OF_KIND[kind.kind] if kind else ()) + STEPS,
        (
            "A rank of the group that is not among these dumps and is elsewhere.",
            "Flight Recorder numbers that differ between the ranks: then they are not in the same collective.",
        ),
        kind.kind if kind else "",
    )


def certainty(case: Case, graph: Graph, first: ProcessState | None) -> Confidence:
    """Return the level of the pattern; `first` is a rank that waits in more than the device."""
    # Equal stacks may still belong to different steps: only records make it certain.
    agreed = any(finding.kind == "same" for finding in case.findings)
    best: Confidence = "high" if first and agreed else "medium"
    if first is not None and (
        first.thread_wait.kind == "backward" or any(c.thread_wait.kind == "device" for c in graph.waiting)
    ):
        best = "low"  # some wait for the device, which may run another collective than the others
    if case.missing or len(case.ranks) < 2:  # a rank that was not read may be elsewhere
        best = "medium" if best == "high" else "low"
    return best


def summary(case: Case, process_state: ProcessState, kind: Found | None) -> str:
    """Return the verdict as a sentence; it claims no more than what was read."""
    where = f"{operation(process_state)} at {place(process_state)}"
    if case.missing or len(case.ranks) < 2:
        one = len(case.missing) == 1
        unread = (
            f"{'rank' if one else 'ranks'} {rank_ranges(case.missing)}" if case.missing else "the other ranks"
        )
        text = (
            f"{name_ranks(case.ranks).capitalize()} {plural(case.ranks, 'waits', 'wait')} in {where}; "
            f"whether {unread}, which {'was' if one else 'were'} not read, reached it is not known"
        )
        return f"{text}; {kind.says}." if kind else f"{text}."
    why = kind.says if kind else "check the network, the driver and the devices"
    return f"All {len(case.ranks)} ranks wait in {where}: every rank reached it, {'and' if kind else 'so'} {why}."


def communicates(process_state: ProcessState) -> bool:
    thread_wait = process_state.thread_wait
    names = (f"{frame.function} {frame.file}" for frame in thread_wait.frames if not frame.native)
    return thread_wait.kind == "collective" or (
        thread_wait.kind == "device" and any(TRANSFER.search(name) for name in names)
    )


def from_records(case: Case) -> Verdict | None:
    """Return the verdict without stacks, where every rank's record ends in the same unfinished
    collective.
    """
    findings = case.findings
    if not findings or any(finding.kind != "same" for finding in findings):
        return None
    finding, kind = findings[0], kind_of(case)
    fact = f"{finding.source}, group {finding.group}: {finding.detail}"
    return Verdict(
        "nccl_timeout",
        # A watchdog speaks of its own rank only: whoever wrote nothing may be elsewhere.
        "medium" if finding.source != "watchdog" else "low",
        kind.ranks if kind else (),
        f"{finding.source.capitalize()}: {finding.detail} of group {finding.group}, and it has not completed"
        f"{f'; {kind.says}' if kind else ''}.",
        (Evidence(rank_ranges(finding.agreeing_ranks), fact), *(kind.evidence if kind else ())),
        (STEPS_OF_KIND[kind.kind] if kind else ()) + STEPS,
        ("A rank of that group whose record is missing.",),
        kind.kind if kind else "",
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
                rank_ranges(finding.odd_ranks), f"{finding.source}, group {finding.group}: {finding.detail}"
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
