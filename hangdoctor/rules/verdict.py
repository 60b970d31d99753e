"""The result of a rule, and the confidence it may claim.

One sample of a job cannot distinguish slow from stuck, so it caps the confidence at medium; ranks
that were not seen, or ranks that are elsewhere for another reason, lower it by one level.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hangdoctor.case import UNINTERRUPTIBLE, Case, ProcessState
from hangdoctor.frames import location_of, show
from hangdoctor.graph import Graph
from hangdoctor.groups import first_divergent, rank_ranges
from hangdoctor.model import Confidence, Evidence, Kind, Label, NextStep, Rank
from hangdoctor.waits import ThreadState

# Waits that take seconds in a healthy step: no movement for less than PATIENCE_S proves little.
SLOW_KINDS = (
    "data",
    "http",
    "rpc",
    "subprocess",
    "checkpoint",
    "file",
    "future",
    "queue",
    "socket",
    "join",
    "load",
    "import",
)
PATIENCE_S = 10.0
# A single write to a busy disk takes this long, uninterruptibly, in a job that is healthy.
DISK_PATIENCE_S = 2.0
LEVELS: tuple[Confidence, ...] = ("low", "medium", "high")
MAX_EVIDENCE = 8
MAX_CLAUSES = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a rule. `culprits` are ranks; the victims are the other ranks that wait."""

    label: Label
    confidence: Confidence
    culprits: tuple[Rank, ...]
    summary: str
    evidence: tuple[Evidence, ...]
    next_steps: tuple[NextStep, ...]
    would_refute: tuple[str, ...]
    kind: Kind = ""


def confidence(
    case: Case, graph: Graph, culprits: Sequence[ProcessState], best: Confidence = "high"
) -> Confidence:
    """Return the highest level that this case allows; `best` is the level that the pattern alone
    may claim.
    """
    level = LEVELS.index(best)
    if case.num_samples < 2:
        level = min(level, 1)
    elif any(process_state.moved for process_state in culprits):
        level -= 1
    if case.span_s < PATIENCE_S and any(
        process_state.thread_wait.kind in SLOW_KINDS for process_state in culprits
    ):
        level = min(level, 1)
    if any(process_state.works or in_short_sleep(case, process_state) for process_state in culprits):
        level = 0
    unseen = sum(
        1 for status in case.missing.values() if status in ("not_permitted", "not_python", "timed_out")
    )
    if len(case.ranks) < 2 or unseen or (case.missing and not case.lost):
        level -= 1
    mine = {process_state.name for process_state in culprits}
    elsewhere = [s for s in graph.source_ranks if s.name not in mine]
    if culprits and elsewhere and not {s.name for s in graph.source_ranks}.isdisjoint(mine):
        level -= 1
    if waiters_move(graph):
        level = 0
    return LEVELS[max(level, 0)]


def in_short_sleep(case: Case, process_state: ProcessState) -> bool:
    """True if a process sleeps uninterruptibly, and the samples are too close to distinguish slow
    storage from storage that is gone.
    """
    return (
        process_state.facts.state == UNINTERRUPTIBLE
        and case.num_samples > 1
        and 0 < case.span_s < DISK_PATIENCE_S
    )


def waiters_move(graph: Graph) -> bool:
    """True if most of the ranks that wait for others made progress between the samples: then
    nothing blocks them.
    """
    return sum(1 for s in graph.waiting_ranks if s.moved) * 2 > len(graph.waiting_ranks)


def ranks_of(process_states: Sequence[ProcessState]) -> tuple[Rank, ...]:
    """Return the ranks of some processes in order, names last."""
    return tuple(
        sorted((s.rank for s in process_states if s.rank is not None), key=lambda r: (isinstance(r, str), r))
    )


def name_ranks(process_states: Sequence[ProcessState]) -> str:
    found = ranks_of(process_states)
    if len(found) == 1:
        return f"rank {found[0]}" if isinstance(found[0], int) else str(found[0])
    return f"ranks {rank_ranges(found)}"


def begin(text: str) -> str:
    """Return the beginning of a sentence; the name of a process stays as it is."""
    return f"R{text[1:]}" if text.startswith(("rank ", "ranks ")) else text


def plural(process_states: Sequence[ProcessState], one: str, many: str) -> str:
    """Return `one` for a single process, else `many`."""
    return one if len(process_states) == 1 else many


def place(process_state: ProcessState) -> str:
    """Return the place in the user's program where a process is, as a phrase."""
    chain = process_state.thread_wait.chain
    frame = chain[0] if chain else process_state.thread_wait.frame
    return show(frame) if frame else "no frame of the program"


def waiting_for(graph: Graph) -> str:
    if not graph.waiting:
        return "no peer waits for it"
    first = graph.waiting[0]
    return f"{name_ranks(first.members)} {plural(first.members, 'waits', 'wait')} in {operation(first.members[0])}"


def apart(graph: Graph, odd: Sequence[ProcessState]) -> str:
    """Return where each cluster of waiting ranks is, those of `odd` first, as one clause each."""
    names = {process_state.name for process_state in odd}
    clusters = sorted(graph.waiting, key=lambda c: names.isdisjoint(m.name for m in c.members))
    clauses = [
        f"{name_ranks(c.members)} {plural(c.members, 'waits', 'wait')} in {operation(c.members[0])} at {place(c.members[0])}"
        for c in clusters[:MAX_CLAUSES]
    ]
    if rest := [member for c in clusters[MAX_CLAUSES:] for member in c.members]:
        clauses.append(f"{name_ranks(rest)} {plural(rest, 'waits', 'wait')} elsewhere")
    text = ", while ".join([clauses[0], " and ".join(clauses[1:])]) if clauses[1:] else clauses[0]
    return text[0].upper() + text[1:]


def apart_evidence(graph: Graph, odd: Sequence[ProcessState]) -> tuple[Evidence, ...]:
    """Return one line per rank of `odd` (at most eight) with the operation it waits in."""
    found = [e for s in odd[:MAX_EVIDENCE] for e in stack_evidence([s], f"waits in {operation(s)}", graph)]
    return tuple(found)


def operation(process_state: ProcessState) -> str:
    """Return the operation that a process waits in, as a phrase."""
    thread_wait = process_state.thread_wait
    return {
        "device": "a synchronisation with the device",
        "backward": "the backward pass",
        "store": f"the store ({thread_wait.operation})",
    }.get(thread_wait.kind, thread_wait.operation or thread_wait.kind)


def stack_evidence(
    process_states: Sequence[ProcessState], fact: str, graph: Graph | None = None
) -> tuple[Evidence, ...]:
    """Return one line per culprit (at most eight) with the frame that shows the wait and where its
    path diverges from its peers'.
    """
    found = []
    peers = [c.members[0].thread_wait.frames for c in graph.waiting[:8]] if graph else []
    for process_state in process_states[:MAX_EVIDENCE]:
        frame = process_state.thread_wait.frame
        others = [p for p in peers if p is not process_state.thread_wait.frames]
        fork = (
            first_divergent(process_state.thread_wait.frames, others)
            if others and process_state.thread_wait.frames
            else None
        )
        diverges = f"; its path diverges from its peers' at {show(fork)}" if fork else ""
        found.append(
            Evidence(
                ranks=str(process_state.rank if process_state.rank is not None else ""),
                fact=fact + diverges,
                process=process_state.name,
                thread=process_state.thread,
                frame=frame.function if frame else "",
                location=location_of(frame),
            )
        )
    return tuple(found)


def thread_evidence(process_state: ProcessState, thread: ThreadState, fact: str) -> Evidence:
    frame = thread.thread_wait.frame
    what = f"{fact} {thread.thread_wait.operation or thread.thread_wait.kind}"
    return Evidence(
        ranks=str(process_state.rank if process_state.rank is not None else ""),
        fact=what,
        process=process_state.name,
        thread=thread.thread,
        frame=frame.function if frame else "",
        location=location_of(frame),
    )


def waiting_evidence(graph: Graph, culprits: Sequence[ProcessState] = ()) -> tuple[Evidence, ...]:
    """Return one line per place where ranks wait for others; places where only culprits wait are
    covered already.
    """
    found = []
    blamed = {process_state.name for process_state in culprits}
    for cluster in [c for c in graph.waiting if not blamed.issuperset(m.name for m in c.members)][:4]:
        frame = cluster.thread_wait.frame
        site = f" called from {show(cluster.thread_wait.chain[0])}" if cluster.thread_wait.chain else ""
        found.append(
            Evidence(
                ranks=cluster.ranks,
                fact=f"{plural(cluster.members, 'waits', 'wait')} in {operation(cluster.members[0])}{site}",
                thread=cluster.members[0].thread,
                frame=frame.function if frame else "",
                location=location_of(frame),
            )
        )
    return tuple(found)


def stillness(case: Case) -> tuple[Evidence, ...]:
    """Return what the samples show about movement."""
    if case.num_samples < 2:
        return (Evidence("", "one sample only: it cannot distinguish slow from stuck"),)
    moved = [s for s in case.ranks if s.moved]
    still = len(case.ranks) - len(moved)
    fact = f"{still} of {len(case.ranks)} ranks were at the same place in all {case.num_samples} samples"
    return (Evidence(rank_ranges(ranks_of(moved)), fact + ("; these moved" if moved else "")),)


def step(do: str, why: str, cost: str = "") -> NextStep:
    """Return a `NextStep`."""
    return NextStep(do, why, cost)


def source_verdict(
    label: Label,
    case: Case,
    graph: Graph,
    culprits: Sequence[ProcessState],
    what: str,
    next_steps: tuple[NextStep, ...],
    would_refute: tuple[str, ...],
    best: Confidence = "high",
    more: tuple[Evidence, ...] = (),
) -> Verdict:
    """Return the verdict of every rule whose culprits are outside the operation that their peers
    wait in.
    """
    level = confidence(case, graph, culprits, best if graph.waiting else "medium")
    return Verdict(
        label,
        level,
        ranks_of(culprits),
        f"{begin(name_ranks(culprits))} {plural(culprits, 'waits', 'wait')} {what} at {place(culprits[0])}; {waiting_for(graph)}.",
        stack_evidence(culprits, f"waits {what}", graph) + more + waiting_evidence(graph) + stillness(case),
        next_steps,
        would_refute,
    )
