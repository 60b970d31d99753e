"""The rule for ranks that all wait in one collective, and what keeps it from ending.

launch     a thread of a rank is still inside the call that gives the kernel to the device (module
           loading, connection set-up, a full queue), or its record is scheduled where that of the
           others is started
transport  the kernel runs on every rank and moves nothing: an unresponsive peer, an error of the
           network plugin, gloo's own buffers
device     a device reports an error, or computes nothing while the others' spin in the kernel

The kind is unknown where no native frame, record, report or log decides.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hangdoctor.case import Case, Process
from hangdoctor.graph import Graph, rank_ranges, same_place
from hangdoctor.model import CollectiveRecord, Confidence, Evidence, Kind, NextStep, Rank
from hangdoctor.parse.logs import LOGGED, first_match, only_absent, watchdog_timeouts
from hangdoctor.recorded_operations import behind_by_ras, silent_in
from hangdoctor.rules.verdict import (
    Verdict,
    confidence,
    make_verdict,
    name_ranks,
    operation,
    place,
    plural,
    ranks_text,
    steps_of,
    stillness,
    waiting_evidence,
)
from hangdoctor.tables import message

LAUNCH = message("nccl", "launch")
GLOO = re.compile(r"gloo::transport::.*")
TRANSPORT_LOG = message("nccl", "transport_log")
DEVICE_LOG = message("nccl", "device_log")
UNNAMED_TIME_OUT = message("nccl", "unnamed_time_out")
LOST_PEER = message("nccl", "lost_peer")
IDLE_PERCENT, SPINNING_PERCENT = 5.0, 90.0
# Code that synchronises with the device because messages to other ranks are under way.
TRANSFER = re.compile(r"nccl|p2p|batch_isend|transfer_stream|communicat", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Found:
    """The kind with the ranks that show it (empty where it has no rank of its own)."""

    kind: Kind = ""
    ranks: tuple[Rank, ...] = ()
    says: str = ""
    evidence: tuple[Evidence, ...] = ()


def nccl_timeout(case: Case, graph: Graph) -> Verdict | None:
    if not case.ranks:
        return from_records(case)
    waiting = graph.waiting_ranks
    if graph.sources or case.lost or not graph.waiting or not same_place(graph.waiting):
        return None
    first = next((c.members[0] for c in graph.waiting if c.wait.kind != "device"), None)
    if len(waiting) < 2 and not (case.snapshot.expected and communicates(waiting[0])):
        return None
    if first is not None and first.wait.kind not in ("collective", "backward"):
        return None
    behind, found = recorded(case)
    kind = kind_of(case)
    return make_verdict(
        "nccl_timeout",
        confidence(case, graph, waiting, certainty(case, graph, first)),
        behind or kind.ranks,
        summary(case, first or graph.waiting[0].members[0], kind),
        waiting_evidence(graph) + found + kind.evidence + stillness(case),
        steps=steps_of_kind(kind),
        kind=kind.kind,
    )


def steps_of_kind(kind: Found) -> tuple[NextStep, ...]:
    own = steps_of("nccl_timeout", kind.kind) if kind.kind in ("stuck_in_launch", "device") else ()
    return own + steps_of("nccl_timeout")


def certainty(case: Case, graph: Graph, first: Process | None) -> Confidence:
    """Return the level of the pattern; `first` is a rank that waits in more than the device."""
    # Equal stacks may still belong to different steps: only records make it certain.
    agreed = any(finding.kind == "same" for finding in case.findings)
    best: Confidence = "high" if first and agreed else "medium"
    on_device = any(c.wait.kind == "device" for c in graph.waiting)
    if first is not None and (first.wait.kind == "backward" or on_device):
        best = "low"  # some wait for the device, which may run another collective than the others
    if case.missing or len(case.ranks) < 2:  # a rank that was not read may be elsewhere
        best = "medium" if best == "high" else "low"
    return best


def summary(case: Case, process: Process, kind: Found) -> str:
    """Return the verdict as a sentence; it claims no more than what was read."""
    where = f"{operation(process)} at {place(process)}"
    if case.missing or len(case.ranks) < 2:
        one = len(case.missing) == 1
        unread = ranks_text(case.missing) if case.missing else "the other ranks"
        text = (
            f"{name_ranks(case.ranks).capitalize()} {plural(case.ranks, 'waits', 'wait')} in {where}; "
            f"whether {unread}, which {'was' if one else 'were'} not read, reached it is not known"
        )
        return f"{text}; {kind.says}." if kind.kind else f"{text}."
    why = f"and {kind.says}" if kind.kind else "or one is a call ahead: compare steps, then the network"
    return f"All {len(case.ranks)} ranks wait in {where}: every rank reached it, {why}."


def communicates(process: Process) -> bool:
    names = (f"{frame.function} {frame.file}" for frame in process.wait.frames if not frame.native)
    on_device = process.wait.kind == "device" and any(TRANSFER.search(name) for name in names)
    return process.wait.kind == "collective" or on_device


def from_records(case: Case) -> Verdict | None:
    """Return the verdict without stacks, where every rank's record ends in the same unfinished
    collective.
    """
    if any(finding.kind != "same" for finding in case.findings):
        return None
    if not case.findings:
        return alone_in_time_out(case) or from_messages(case)
    finding, kind = case.findings[0], kind_of(case)
    says = f"; {kind.says}" if kind.kind else ""
    seen, is_logged = finding.agreeing_ranks, finding.source in LOGGED
    absent = only_absent(seen) if is_logged and len(seen) > 2 else ()
    says += f"; rank {absent[0]} wrote no time-out: it may be elsewhere" if absent else ""
    fact = f"{finding.source}, group {finding.group}: {finding.detail}"
    # A watchdog speaks of its own rank only: whoever wrote nothing may be elsewhere.
    return of_records(
        kind,
        "low" if is_logged else "medium",
        kind.ranks or absent,
        f"{finding.source.capitalize()}: {finding.detail} of group {finding.group}, and it has not completed{says}.",
        (Evidence(rank_ranges(seen), fact), *kind.evidence),
    )


def of_records(
    kind: Found, level: Confidence, ranks: tuple[Rank, ...], says: str, evidence: tuple[Evidence, ...]
) -> Verdict:
    """Return the verdict of what records or messages say, with the steps of its kind."""
    steps = steps_of_kind(kind)
    return make_verdict("nccl_timeout", level, ranks, says, evidence, "records", steps=steps, kind=kind.kind)


def alone_in_time_out(case: Case) -> Verdict | None:
    """Return the verdict for watchdogs whose messages cannot be compared: of one rank, or of
    several groups.
    """
    found = {
        rank: (name, number) for log in case.snapshot.logs for rank, number, name in watchdog_timeouts(log)
    }
    if not found or case.lost:
        return None
    kind = kind_of(case)
    says = [f"rank {rank} in {numbered(*call)}" for rank, call in sorted(found.items())]
    more = f" and {len(says) - 3} more" if len(says) > 3 else ""
    summary = f"The watchdog timed out: {', '.join(says[:3])}{more}; whether their peers reached these is not known."
    calls = [
        Evidence(str(rank), f"its watchdog timed out on {numbered(*call)}") for rank, call in found.items()
    ]
    return of_records(kind, "low", kind.ranks, summary, (*calls, *kind.evidence)[:8])


def from_messages(case: Case) -> Verdict | None:
    """Return the verdict for messages of which none names its rank: a time-out, or a connection
    that a peer has closed.
    """
    if case.snapshot.endings:
        return None
    timed_out = first_match(case.snapshot.logs, UNNAMED_TIME_OUT)
    lost = first_match(case.snapshot.logs, LOST_PEER)
    if timed_out is None and lost is not None:
        log, match = lost
        peer = f"The peer {match['peer']}" if match["peer"] else "A peer"
        summary = f"{peer} closed its connection: it ended first, and no message names its rank."
        said = Evidence("", match.string.strip()[:200], log.name)
        return make_verdict("missing_rank", "low", (), summary, (said,), "gone")
    kind = kind_of(case)
    if timed_out is None and kind.kind != "transport":
        return None
    says, evidence = "The network reports an error; no message names a rank.", kind.evidence
    if timed_out is not None:
        log, match = timed_out
        says = f"The watchdog of rank {match['rank']} timed out; no message says in which operation."
        if not match["rank"]:
            says = f"A watchdog timed out in {match['op'].lower()}; no message says on which rank."
        evidence = (Evidence("", match.string.strip()[:200], log.name), *evidence)
    return of_records(kind, "low", (), says, evidence)


def numbered(name: str, number: int) -> str:
    """Return an operation with its number, where a message had one."""
    return f"{name} number {number}" if number else name


def recorded(case: Case) -> tuple[tuple[Rank, ...], tuple[Evidence, ...]]:
    """Return the ranks that records, RAS or watchdog messages report as behind, with the findings
    as evidence.
    """
    found = [
        Evidence(rank_ranges(f.odd_ranks), f"{f.source}, group {f.group}: {f.detail}") for f in case.findings
    ]
    behind = next((f.odd_ranks for f in case.findings if f.kind == "behind"), ())
    ras, fact = behind_by_ras(case.snapshot.ras)
    if ras:
        found.append(Evidence(rank_ranges(ras), fact))
    for log in case.snapshot.logs[:1000]:
        for rank, sequence, name in watchdog_timeouts(log)[:2]:
            found.append(
                Evidence(str(rank), f"its watchdog timed out on {numbered(name, sequence)}", log.name)
            )
    return behind or ras, tuple(found[:8])


def kind_of(case: Case) -> Found:
    """Return what keeps the collective from ending; of no kind where nothing decides."""
    return (
        from_logs(case, DEVICE_LOG, "device", "a device reports an error")
        or launching(case.ranks)
        or scheduled(case.snapshot.records)
        or silent_peers(case)
        or from_logs(case, TRANSPORT_LOG, "transport", "the network reports an error")
        or idle_devices(case)
        or gloo_buffers(case.ranks)
        or all_started(case.snapshot.records)
        or Found()
    )


def launching(ranks: Iterable[Process]) -> Found | None:
    """Return ranks whose waiting thread is still inside a call that launches the kernel."""
    found = {}
    for process in ranks:
        native = [f for f in process.wait.frames if f.native and LAUNCH.fullmatch(f.function)]
        if native and process.rank is not None:
            found[process.rank] = native[0].function
    if not found:
        return None
    evidence = tuple(Evidence(str(rank), f"is inside {call}") for rank, call in list(found.items())[:4])
    return Found(
        "stuck_in_launch", tuple(found), f"{named(found)} still inside the launch of the kernel", evidence
    )


def scheduled(records: tuple[CollectiveRecord, ...]) -> Found | None:
    """Return ranks whose last operation has not started where that of others of the group has."""
    late, begun = by_state(records)
    if not late or not begun:
        return None
    fact = f"its last collective is scheduled, while that of ranks {rank_ranges(begun)} has started"
    return Found(
        "stuck_in_launch",
        late,
        f"{named(late)} still before the start of the kernel",
        (Evidence(rank_ranges(late), fact),),
    )


def all_started(records: tuple[CollectiveRecord, ...]) -> Found | None:
    late, begun = by_state(records)
    if late or len(begun) < 2:
        return None
    fact = "the collective has started on all of them and has not completed"
    evidence = (Evidence(rank_ranges(begun), fact),)
    return Found("transport", (), "the kernel runs on every rank and receives nothing", evidence)


def by_state(records: tuple[CollectiveRecord, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks whose last operation of the group is scheduled, and those where it started.

    A watchdog's message does not say whether the kernel had started.
    """
    last: dict[int, CollectiveRecord] = {}
    for record in records:
        known = last.get(record.rank, record)
        if not record.is_p2p and record.source not in LOGGED and record.sequence >= known.sequence:
            last[record.rank] = record
    if len({(record.group, record.sequence) for record in last.values()}) != 1:
        return (), ()
    late = tuple(sorted(rank for rank, record in last.items() if record.state == "scheduled"))
    return late, tuple(sorted(rank for rank, record in last.items() if record.state == "started"))


def silent_peers(case: Case) -> Found | None:
    silent = silent_in(case.snapshot.ras)
    evidence = (Evidence(rank_ranges(silent), "RAS gets no response from them"),)
    return Found("transport", silent, f"RAS cannot reach {ranks_text(silent)}", evidence) if silent else None


def from_logs(case: Case, words: re.Pattern[str], kind: Kind, says: str) -> Found | None:
    """Return the kind where a log has a message of it. A device is that of the log's rank; an error
    of the network is written by those that the failed peer has left.
    """
    found = first_match(case.snapshot.logs, words)
    if found is None:
        return None
    log, match = found
    ranks = () if log.rank is None else (log.rank,)
    where = f"the log of {ranks_text(ranks)}" if ranks else "a log"
    evidence = (Evidence(rank_ranges(ranks), f"{where}: {match.string.strip()[:200]}", log.name),)
    return Found(kind, ranks if kind == "device" else (), f"{says} ({where})", evidence)


def idle_devices(case: Case) -> Found | None:
    """Return the device where one computes nothing while the others spin in the kernel."""
    last = max((gpu.sample for gpu in case.snapshot.gpus), default=0)
    now = [g for g in case.snapshot.gpus if g.sample == last and g.utilization_percent is not None]
    idle = [g for g in now if (g.utilization_percent or 0.0) <= IDLE_PERCENT]
    spinning = [g for g in now if (g.utilization_percent or 0.0) >= SPINNING_PERCENT]
    if not idle or not spinning or len(idle) * 2 > len(now) or len(idle) + len(spinning) < len(now):
        return None
    names = ", ".join(f"{gpu.host}:{gpu.index}" for gpu in idle[:4])
    evidence = (Evidence("", f"GPU {names} computes nothing while {len(spinning)} others are at work"),)
    return Found("device", (), f"GPU {names} computes nothing", evidence)


def gloo_buffers(ranks: tuple[Process, ...]) -> Found | None:
    inside = [s for s in ranks if any(f.native and GLOO.match(f.function) for f in s.wait.frames)]
    if len(inside) < 2 or len(inside) < len(ranks):
        return None
    evidence = (
        Evidence(rank_ranges(s.rank for s in inside if s.rank is not None), "wait in gloo's buffers"),
    )
    return Found("transport", (), "every rank waits for bytes of a peer", evidence)


def named(ranks: Iterable[Rank]) -> str:
    """Return `rank 3 is` or `ranks 0-2 are`."""
    found = list(ranks)
    return f"{ranks_text(found)} {'is' if len(found) == 1 else 'are'}"
