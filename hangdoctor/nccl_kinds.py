"""What keeps a collective from ending that every rank has reached: its launch, its transport or a
device.

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

from hangdoctor.case import Case, ProcessState
from hangdoctor.groups import rank_ranges
from hangdoctor.model import CollectiveRecord, Evidence, Kind, Rank

LAUNCH = re.compile(
    r"ncclLaunchKernel.*|ncclLaunch.*|ncclGroupEnd.*|ncclGroupLaunch.*|doLaunches.*|ncclEnqueueCheck.*|"
    r"(cuda|cu|hip)(Launch|GraphLaunch|ModuleLoad|LibraryLoad|ModuleGetFunction|FuncGetAttributes|FuncSetAttribute).*|"
    r"ncclTransport\w*Setup.*|initTransportsRank.*|ncclCommInitRank.*|bootstrap(AllGather|Send|Recv|Init).*|"
    r"(cuda|cu)(Malloc|Free|MemAlloc|MemFree|HostAlloc)(?!Async).*"
)
GLOO = re.compile(r"gloo::transport::.*")
TRANSPORT_LOG = re.compile(
    r"NCCL WARN .*(?:NET|IB|socket|connect|transport|peer)|NET/\w+ ?: ?.*(?:fail|error|status=)|ncclRemoteError|"
    r"ncclSystemError|Connection closed by (?:remote )?peer|ibv_\w+ failed|unhandled system error",
    re.IGNORECASE,
)
DEVICE_LOG = re.compile(
    r"\bXid\b|CUDA error|fallen off the bus|uncorrectable ECC|unspecified launch failure|illegal memory access|"
    r"NVLink.{0,40}error|ncclUnhandledCudaError|unhandled cuda error",
    re.IGNORECASE,
)
RAS_SILENT = ("MISSING", "DEAD", "UNRESPONSIVE")
IDLE_PERCENT, SPINNING_PERCENT = 5.0, 90.0


@dataclass(frozen=True, slots=True)
class Found:
    """The kind with the ranks that show it (empty where it has no rank of its own)."""

    kind: Kind
    ranks: tuple[Rank, ...]
    says: str
    evidence: tuple[Evidence, ...]


def kind_of(case: Case) -> Found | None:
    """Return what keeps the collective from ending, or None where nothing decides."""
    return (
        from_logs(case, DEVICE_LOG, "device", "a device reports an error")
        or launching(case.ranks)
        or scheduled(case.snapshot.records)
        or silent_peers(case)
        or from_logs(case, TRANSPORT_LOG, "transport", "the network reports an error")
        or idle_devices(case)
        or gloo_buffers(case.ranks)
        or all_started(case.snapshot.records)
    )


def launching(ranks: Iterable[ProcessState]) -> Found | None:
    """Return ranks whose waiting thread is still inside a call that launches the kernel."""
    found = {}
    for process_state in ranks:
        native = [f for f in process_state.thread_wait.frames if f.native and LAUNCH.fullmatch(f.function)]
        if native and process_state.rank is not None:
            found[process_state.rank] = native[0].function
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
        if not record.is_p2p and record.source != "watchdog" and record.sequence >= known.sequence:
            last[record.rank] = record
    if len({(record.group, record.sequence) for record in last.values()}) != 1:
        return (), ()
    late = tuple(sorted(rank for rank, record in last.items() if record.state == "scheduled"))
    return late, tuple(sorted(rank for rank, record in last.items() if record.state == "started"))


def silent_peers(case: Case) -> Found | None:
    silent = tuple(sorted({r.rank for r in case.snapshot.ras if r.status in RAS_SILENT}))
    evidence = (Evidence(rank_ranges(silent), "RAS gets no response from them"),)
    return Found("transport", silent, f"RAS cannot reach {ranks_text(silent)}", evidence) if silent else None


def from_logs(case: Case, words: re.Pattern[str], kind: Kind, says: str) -> Found | None:
    """Return the kind where a log has a message of it. A device is that of the log's rank; an error
    of the network is written by those that the failed peer has left.
    """
    for log in case.snapshot.logs:
        line = next((line for line in log.lines if words.search(line)), None)
        if line is not None:
            ranks = () if log.rank is None else (log.rank,)
            where = f"the log of {ranks_text(ranks)}" if ranks else "a log"
            evidence = (Evidence(rank_ranges(ranks), f"{where}: {line.strip()[:200]}", log.name),)
            return Found(kind, ranks if kind == "device" else (), f"{says} ({where})", evidence)
    return None


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


def gloo_buffers(ranks: tuple[ProcessState, ...]) -> Found | None:
    inside = [s for s in ranks if any(f.native and GLOO.match(f.function) for f in s.thread_wait.frames)]
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


def ranks_text(ranks: Iterable[Rank]) -> str:
    found = list(ranks)
    return f"{'rank' if len(found) == 1 else 'ranks'} {rank_ranges(found)}"
