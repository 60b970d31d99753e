"""A snapshot understood: for each process where it stands, whether it moved, and what else goes on inside it.

Snapshot -> by process: threads of the best sample -> Stance of the main thread
                        other threads and /proc    -> what the main thread really waits for
                        all samples                -> moved or not
         -> Case: ranks (the job's own), others (engines, children), missing
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise

from hangdoctor.frames import is_library, main_thread, python_only
from hangdoctor.model import Frame, ProcessDump, ProcessFacts, Rank, Snapshot, Status, Thread
from hangdoctor.patterns import POSTED, SOURCE, WCHAN
from hangdoctor.waits import Stance, compiled, stance_of

# A main thread that waits for another thread of its process: that thread knows what for.
DELEGATING = ("future", "event", "queue", "join", "idle")
TELLING = (
    "http",
    "rpc",
    "collective",
    "p2p",
    "checkpoint",
    "subprocess",
    "data",
    "store",
    "file_lock",
    "prompt",
)
# Measured: the main thread of a hung rank is not switched to once between two samples; that of a rank which
# steps is switched to at least 20 times a second, however loaded the machine.
RAN_SWITCHES = 5
# A wait that spins or polls runs as well: its switches say nothing. These kinds only run when there is work.
WORKING_KINDS = (
    "running", "blocked", "compile", "import", "load", "file", "checkpoint", "lock", "gil", "backward", "data", "http",
)  # fmt: skip
BUSY_CPU_FRACTION = 0.5


@dataclass(frozen=True, slots=True)
class ThreadStance:
    thread: str
    stance: Stance
    holds_gil: bool
    waits_for_gil: bool


@dataclass(frozen=True, slots=True)
class Standing:
    """One process of the job, over all samples.

    `moved`: the main thread stood elsewhere in the program; `ran`: the kernel switched to it in between;
    `cpu_fraction`: CPU seconds of the process per second. Each is None where the samples cannot tell.
    """

    name: str
    rank: Rank | None
    role: str
    host: str | None
    status: Status
    detail: str
    parent: str | None
    stance: Stance
    thread: str
    threads: tuple[ThreadStance, ...]
    moved: bool | None
    ran: bool | None
    cpu_fraction: float | None
    facts: ProcessFacts
    pid: int | None

    @property
    def busy(self) -> bool:
        return self.cpu_fraction is not None and self.cpu_fraction > BUSY_CPU_FRACTION

    @property
    def works(self) -> bool:
        """Whether it gets something done: it computes, or its main thread ran although it waits for
        nobody.
        """
        return self.busy or (bool(self.ran) and self.stance.kind in WORKING_KINDS)


@dataclass(frozen=True, slots=True)
class Case:
    """Everything a rule looks at. `ranks` are the trainer's ranks, or those of the only role there is;
    `span_s` is the time between the first and the last sample.
    """

    snapshot: Snapshot
    role: str
    ranks: tuple[Standing, ...]
    others: tuple[Standing, ...]
    missing: dict[int, Status]
    certain_missing: bool
    span_s: float

    @property
    def num_samples(self) -> int:
        return self.snapshot.num_samples

    @property
    def world_size(self) -> int:
        return len(self.ranks) + len(self.missing)

    def children_of(self, name: str) -> list[Standing]:
        return [other for other in self.others if other.parent == name]


def build_case(snapshot: Snapshot) -> Case:
    """Understand a snapshot. Cost is linear in processes; equal stacks are understood once."""
    by_process: dict[str, list[ProcessDump]] = defaultdict(list)
    for dump in snapshot.dumps:
        by_process[dump.name].append(dump)
    seen: dict[int, tuple[ThreadStance, ...]] = {}
    standings = [standing_of(dumps, seen, snapshot.source) for dumps in by_process.values()]
    role = primary_role(standings)
    ranks = [s for s in standings if s.role == role and s.rank is not None and s.threads]
    others = [named(s, role) for s in standings if s.role != role or s.rank is None]
    present = {s.rank for s in ranks}
    if role == "trainer" and snapshot.expected:
        missing = {rank: status for rank, status in snapshot.expected.items() if rank not in present}
        certain = True
    else:
        top = max((rank for rank in present if isinstance(rank, int)), default=-1)
        missing = {rank: "gone" for rank in range(min(top, 1_000_000)) if rank not in present}
        certain = False
    times = {dump.time for dump in snapshot.dumps if dump.time is not None}
    missing = {rank: "gone" if status == "dumped" else status for rank, status in missing.items()}
    return Case(
        snapshot=snapshot,
        role=role,
        ranks=tuple(sorted(ranks, key=lambda s: s.rank if isinstance(s.rank, int) else 0)),
        others=tuple(others),
        missing=missing,
        certain_missing=certain,
        span_s=max(times) - min(times) if times else 0.0,
    )


def primary_role(standings: list[Standing]) -> str:
    """`trainer` where there is one; else the role that most ranked processes have."""
    counts = Counter(s.role for s in standings if s.rank is not None)
    return "trainer" if counts["trainer"] or not counts else counts.most_common(1)[0][0]


def named(standing: Standing, primary: str) -> Standing:
    """Ranks of another role are known by their process name: number 1 of the engine is not rank 1."""
    return replace(standing, rank=standing.name) if standing.rank is not None else standing


def standing_of(
    dumps: list[ProcessDump], seen: dict[int, tuple[ThreadStance, ...]], source: dict[str, str]
) -> Standing:
    dumps = sorted(dumps, key=lambda dump: dump.sample)
    views = [view(dump.threads, seen, source) for dump in dumps]
    at = best_sample(views)
    dump, threads = dumps[at], views[at]
    mains = [v[0] for v in views if v]
    stance, thread = effective(threads, dump)
    return Standing(
        name=dump.name,
        rank=dump.rank,
        role=dump.role,
        host=dump.host,
        status="stopped" if dump.facts.state in ("T", "t") else dump.status,
        detail=dump.detail,
        parent=dump.parent,
        stance=stance,
        thread=thread,
        threads=threads,
        moved=has_moved(mains, dumps, stance) if len(mains) > 1 else None,
        ran=has_run(dumps),
        cpu_fraction=cpu_fraction(dumps),
        facts=dump.facts,
        pid=dump.pid,
    )


def view(
    threads: tuple[Thread, ...], seen: dict[int, tuple[ThreadStance, ...]], source: dict[str, str]
) -> tuple[ThreadStance, ...]:
    """Stances of all threads, main thread first. Equal dumps are one object, so identity finds them again."""
    if id(threads) not in seen:
        main = main_thread(threads)
        ordered = sorted((t for t in threads if t.frames), key=lambda thread: thread is not main)
        seen[id(threads)] = tuple(
            ThreadStance(
                thread.name or ("MainThread" if thread is main else "unnamed thread"),
                refined(stance_of(thread.frames), thread, source),
                bool(thread.holds_gil),
                bool(thread.waits_for_gil),
            )
            for thread in ordered
        )
    return seen[id(threads)]


def refined(stance: Stance, thread: Thread, source: dict[str, str]) -> Stance:
    """A stack that shows no wait: running if the dump saw it run, else blocked in something it does not
    show.
    """
    if thread.waits_for_gil:
        return replace(stance, kind="gil", operation="GIL")
    if stance.kind == "running" and not (thread.active or thread.holds_gil):
        return told_by_source(stance, [f for f in thread.frames if not f.native], source)
    return stance


def told_by_source(stance: Stance, python: list[Frame], source: dict[str, str]) -> Stance:
    """What a line of the program that sleeps in C does, by the text of the line; blocked where that does not
    tell.
    """
    texts = [source.get(f"{frame.file}:{frame.line}", "") for frame in python[:4]]
    for kind, operation, pattern in SOURCE:
        if not texts or not compiled(pattern).search(texts[0]):
            continue
        phases = stance.phases | {"cleanup"} if kind == "destroy" else stance.phases
        if kind == "collective" and (posted := POSTED.search(" ".join(texts))):
            # `work.wait()` waits for what this line, or a caller's, has posted.
            kind, operation = "p2p" if posted[1] else "collective", posted[0]
        return replace(stance, kind=kind, operation=operation, phases=phases)
    return replace(stance, kind="blocked")


def best_sample(views: list[tuple[ThreadStance, ...]]) -> int:
    """The last sample, or one that shows the same Python stack and native frames under it."""
    last = max((i for i, v in enumerate(views) if v), default=0)
    if not views[last]:
        return last
    stack = python_only(views[last][0].stance.frames)
    for i, v in enumerate(views):
        if v and any(f.native for f in v[0].stance.frames) and python_only(v[0].stance.frames) == stack:
            return i
    return last


def effective(threads: tuple[ThreadStance, ...], dump: ProcessDump) -> tuple[Stance, str]:
    """What the process waits for: its main thread's stance, unless that only waits for a thread that tells
    more.
    """
    if not threads:
        return Stance("nothing", "", None, ()), ""
    main = threads[0]
    stance = with_kernel(main.stance, dump.facts)
    if stance.kind in ("backward", "device"):
        for other in threads[1:]:
            if other.stance.kind in ("collective", "p2p") and "autograd" in autograd_hint(other):
                return replace(other.stance, phases=stance.phases | other.stance.phases), other.thread
    if stance.kind in DELEGATING and not ("cleanup" in stance.phases and not stance.chain):
        for other in threads[1:]:
            if other.stance.kind in TELLING and (
                other.stance.chain or other.stance.kind in ("collective", "p2p")
            ):
                return replace(other.stance, phases=stance.phases | other.stance.phases), other.thread
    return stance, main.thread


def autograd_hint(thread: ThreadStance) -> str:
    """Autograd's own threads have no Python entry: nothing of `threading` lies at the bottom of their
    stacks.
    """
    bottom = thread.stance.frames[-1].function if thread.stance.frames else ""
    return "python" if bottom in ("_bootstrap", "<module>") else "autograd"


def with_kernel(stance: Stance, facts: ProcessFacts) -> Stance:
    """Let the kernel say what a line of Python sleeps in; only where the stack itself does not."""
    if facts.state in ("T", "t"):
        return replace(stance, kind="stopped", operation="stopped")
    if stance.kind not in ("blocked", "running") or not facts.wchan:
        return stance
    for kind, pattern in WCHAN:
        if compiled(pattern).fullmatch(facts.wchan):
            return replace(stance, kind=kind, operation=facts.wchan)
    return stance


def has_moved(mains: list[ThreadStance], dumps: list[ProcessDump], stance: Stance) -> bool:
    """Whether the main thread stood elsewhere in the user's program, or ran through its waits, between two
    samples.
    """
    for before, after in pairwise(mains):
        if before.stance is after.stance:
            continue
        if way_to(before.stance) != way_to(after.stance) or leaf(before.stance) != leaf(after.stance):
            return True
    first, last = dumps[0].facts.voluntary_switches, dumps[-1].facts.voluntary_switches
    spins = (cpu_fraction(dumps) or 0.0) > BUSY_CPU_FRACTION
    woken = first is not None and last is not None and last - first >= RAN_SWITCHES
    return stance.kind in ("collective", "p2p") and woken and not spins


def way_to(stance: Stance) -> tuple[Frame, ...]:
    """The program's own calls; in a process that runs a library only, such as an engine, the library's."""
    return stance.chain or python_only(stance.frames)


def leaf(stance: Stance) -> Frame | None:
    """The innermost frame that tells a place in the program: lines inside a library's polling loop do not."""
    python = python_only(stance.frames)
    if not python or (stance.kind not in ("running", "blocked") and is_library(python[0].file)):
        return None
    return python[0]


def has_run(dumps: list[ProcessDump]) -> bool | None:
    """Whether the kernel switched to the main thread between the first and the last sample."""
    first, last = switches(dumps[0].facts), switches(dumps[-1].facts)
    return None if len(dumps) < 2 or first is None or last is None else last - first >= RAN_SWITCHES


def switches(facts: ProcessFacts) -> int | None:
    if facts.voluntary_switches is None or facts.involuntary_switches is None:
        return None
    return facts.voluntary_switches + facts.involuntary_switches


def cpu_fraction(dumps: list[ProcessDump]) -> float | None:
    first, last = dumps[0], dumps[-1]
    before, after = first.facts.cpu_s, last.facts.cpu_s
    if before is None or after is None or first.time is None or last.time is None or last.time <= first.time:
        return None
    return (after - before) / (last.time - first.time)
