"""The analysed snapshot: for each process its wait, whether it moved, and its other threads.

Snapshot -> by process: threads of the best sample -> Wait of the main thread
                        other threads and /proc    -> what the main thread waits for
                        all samples                -> moved or not: place, context switches, CPU time
         -> Case: ranks (of the job itself), others (engines, children), missing
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from hangdoctor.frames import is_library
from hangdoctor.model import Frame, ProcessDump, ProcessFacts, Rank, Snapshot, Status
from hangdoctor.recorded_operations import OperationFinding, findings_of
from hangdoctor.tables import IMPORT_LOCK
from hangdoctor.waits import ThreadState, Wait, best_sample, effective, view

# Measured: the main thread of a hung rank is not switched to once between two samples; that of a
# rank which makes steps is switched to at least 20 times a second, however loaded the machine.
RAN_SWITCHES = 5
UNINTERRUPTIBLE = "D"
BUSY_CPU_FRACTION = 0.5
# A wait that spins or polls runs as well: its context switches prove nothing. These kinds only run
# when there is work.
WORKING_KINDS = (
    "running", "blocked", "compile", "import", "load", "file", "checkpoint", "lock", "gil", "backward", "data", "http",
)  # fmt: skip


def has_moved(mains: list[Wait], dumps: list[ProcessDump], wait: Wait) -> bool:
    """Return whether the main thread was elsewhere in the user's program, or ran through its waits,
    between the last two samples: what moved before may have hung since.
    """
    before, after = mains[-2:]
    if before is not after and (call_path(before) != call_path(after) or leaf(before) != leaf(after)):
        return not has_arrived(mains)
    first, last = dumps[-2].facts.voluntary_switches, dumps[-1].facts.voluntary_switches
    spins = (cpu_fraction(dumps) or 0.0) > BUSY_CPU_FRACTION
    woken = first is not None and last is not None and last - first >= RAN_SWITCHES
    return wait.kind in ("collective", "p2p") and woken and not spins


def has_arrived(mains: list[Wait]) -> bool:
    """True if a rank that was starting in one sample waits for its peers in the next: that it came
    there is no sign that it continues.
    """
    return len(mains) > 1 and starts(mains[-2]) and mains[-1].waits_for_peers and not starts(mains[-1])


def starts(wait: Wait) -> bool:
    """True for a rank that is still starting: it imports, loads, or creates its groups."""
    return wait.kind in ("import", "load", "compile") or "init" in wait.phases


def call_path(wait: Wait) -> tuple[Frame, ...]:
    """Return the program's own calls; in a process that runs a library only, such as an engine, the
    library's.
    """
    return wait.chain or wait.python


def leaf(wait: Wait) -> Frame | None:
    """Return the innermost frame that identifies a place in the program: lines inside a library's
    polling loop do not.
    """
    python = wait.python
    if not python or (wait.kind not in ("running", "blocked") and is_library(python[0].file)):
        return None
    return python[0]


def has_run(dumps: list[ProcessDump]) -> bool | None:
    """Return whether the kernel ran the main thread between the first and the last sample.

    One switch is enough beside an uninterruptible sleep: only what it waits for ends it, such as a
    write to a busy disk, of which there are few in a second.
    """
    before, after = dumps[0].facts, dumps[-1].facts
    first, last = switches(before), switches(after)
    if len(dumps) < 2 or first is None or last is None:
        return None
    return last - first >= (1 if UNINTERRUPTIBLE in (before.state, after.state) else RAN_SWITCHES)


def switches(facts: ProcessFacts) -> int | None:
    """Return voluntary plus involuntary context switches, or None where either is unknown."""
    if facts.voluntary_switches is None or facts.involuntary_switches is None:
        return None
    return facts.voluntary_switches + facts.involuntary_switches


def cpu_fraction(dumps: list[ProcessDump]) -> float | None:
    """Return CPU seconds per second between first and last sample, or None where unknown."""
    first, last = dumps[0], dumps[-1]
    before, after = first.facts.cpu_s, last.facts.cpu_s
    if before is None or after is None or first.time is None or last.time is None or last.time <= first.time:
        return None
    return (after - before) / (last.time - first.time)


@dataclass(frozen=True, slots=True)
class Process:
    """The state of one process of the job, over all samples.

    `moved`: the main thread was at another place of the program; `ran`: the kernel switched to it
    in between; `cpu_fraction`: CPU seconds of the process per second. Each is None where the
    samples are inconclusive. `arrived`: it came from its start to a wait for peers in between.
    """

    name: str
    rank: Rank | None
    role: str
    host: str | None
    status: Status
    detail: str
    parent: str | None
    wait: Wait
    thread: str
    threads: tuple[ThreadState, ...]
    moved: bool | None
    ran: bool | None
    cpu_fraction: float | None
    facts: ProcessFacts
    pid: int | None
    arrived: bool = False
    command: str = ""

    @property
    def busy(self) -> bool:
        """True if the process uses more than half a CPU core."""
        return self.cpu_fraction is not None and self.cpu_fraction > BUSY_CPU_FRACTION

    @property
    def works(self) -> bool:
        """True if it makes progress: it computes, or its main thread ran although it waits for no
        peer.
        """
        return self.busy or (bool(self.ran) and self.wait.kind in WORKING_KINDS)


def import_cycle(process: Process) -> bool:
    """True if a thread waits for a module's import lock while the main thread imports."""
    inside = any(
        f.function == "_find_and_load" or (f.function == "<module>" and f.file.endswith("__init__.py"))
        for f in process.wait.frames
    )
    return inside and any(t.wait.operation == IMPORT_LOCK for t in process.threads[1:])


@dataclass(frozen=True, slots=True)
class Case:
    """The input of every rule.

    `ranks` are the ranks of the trainer, or of the only role there is; `span_s` is the time between
    the first and the last sample, in seconds.
    """

    snapshot: Snapshot
    role: str
    ranks: tuple[Process, ...]
    others: tuple[Process, ...]
    missing: dict[int, Status]
    span_s: float
    findings: tuple[OperationFinding, ...]

    @property
    def num_samples(self) -> int:
        return self.snapshot.num_samples

    @property
    def lost(self) -> dict[int, Status]:
        """Ranks that were looked for and have no stack."""
        return {rank: status for rank, status in self.missing.items() if status != "not_collected"}

    @property
    def not_collected(self) -> tuple[int, ...]:
        """Ranks that the job should have and that nobody looked for: they may be anywhere."""
        return tuple(rank for rank, status in self.missing.items() if status == "not_collected")

    @property
    def world_size(self) -> int:
        """The number of ranks that exist or should exist."""
        return len(self.ranks) + len(self.missing)

    def children_of(self, name: str) -> list[Process]:
        return [other for other in self.others if other.parent == name]


def build_case(snapshot: Snapshot) -> Case:
    """Analyse a snapshot. Cost is linear in processes; equal stacks are analysed once."""
    by_process: dict[str, list[ProcessDump]] = defaultdict(list)
    for dump in snapshot.dumps:
        by_process[dump.name].append(dump)
    seen: dict[int, tuple[ThreadState, ...]] = {}
    processes = [process_of(dumps, seen, snapshot.source) for dumps in by_process.values()]
    roles = Counter(s.role for s in processes if s.rank is not None)
    role = "trainer" if roles["trainer"] or not roles else roles.most_common(1)[0][0]
    ranks = judged(processes, role)
    chosen = {s.name for s in ranks}
    others = [
        replace(s, rank=s.name) if s.rank is not None else s
        for s in processes
        if s.name not in chosen and (s.role != role or s.rank is None or s.threads)
    ]
    present = {s.rank for s in ranks}
    if role == "trainer" and snapshot.expected:
        missing = {rank: status for rank, status in snapshot.expected.items() if rank not in present}
    else:
        top = max((rank for rank in present if isinstance(rank, int)), default=-1)
        # A few gaps may be ranks that died; many only mean that some of the ranks were saved.
        sparse = top > 2 * len(present) + 8
        missing = {rank: "not_collected" for rank in range(0 if sparse else top) if rank not in present}
    times = {dump.time for dump in snapshot.dumps if dump.time is not None}
    missing = {rank: "gone" if status == "dumped" else status for rank, status in missing.items()}
    return Case(
        snapshot=snapshot,
        role=role,
        ranks=tuple(sorted(ranks, key=lambda s: s.rank if isinstance(s.rank, int) else 0)),
        others=tuple(others),
        missing=missing,
        span_s=max(times) - min(times) if times else 0.0,
        findings=findings_of(snapshot.records),
    )


def judged(processes: list[Process], role: str) -> list[Process]:
    """Return the processes that are judged: the ranks of `role` that are no launchers; where no
    process has a rank, all that have a stack, by name; launchers only where there is nothing else.
    """
    ranks = [s for s in processes if s.role == role and s.rank is not None and s.threads]
    if not ranks:
        ranks = [replace(s, rank=s.name) for s in processes if s.threads]
    workers = [s for s in ranks if s.wait.kind != "launcher" and s.role not in ("launcher", "child")]
    return workers or ranks


def process_of(
    dumps: list[ProcessDump], seen: dict[int, tuple[ThreadState, ...]], source: dict[str, str]
) -> Process:
    """Return the state of one process from its dumps. `seen` caches the waits of equal thread
    lists.
    """
    dumps = sorted(dumps, key=lambda dump: dump.sample)
    views = [view(dump.threads, seen, source) for dump in dumps]
    at = best_sample(views)
    dump, threads = dumps[at], views[at]
    mains = [v[0] for v in views if v]
    wait, thread = effective(threads, dump)
    return Process(
        name=dump.name,
        rank=dump.rank,
        role=dump.role,
        host=dump.host,
        status="stopped" if dump.facts.state in ("T", "t") else dump.status,
        detail=dump.detail,
        parent=dump.parent,
        wait=wait,
        thread=thread,
        threads=threads,
        moved=has_moved([main.wait for main in mains], dumps, wait) if len(mains) > 1 else None,
        ran=has_run(dumps),
        cpu_fraction=cpu_fraction(dumps),
        facts=dump.facts,
        pid=dump.pid,
        arrived=has_arrived([main.wait for main in mains]),
        command=dump.command,
    )
