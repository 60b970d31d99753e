"""The result of a rule, the confidence it may claim, and its sentences.

One sample of a job cannot distinguish slow from stuck, so it caps the confidence at medium; ranks
that were not seen, or ranks that are elsewhere for another reason, lower it by one level.
"""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hangdoctor.case import UNINTERRUPTIBLE, Case, Process
from hangdoctor.frames import location_of, show
from hangdoctor.graph import Graph, first_divergent, rank_ranges
from hangdoctor.model import Confidence, Evidence, Frame, Kind, Label, NextStep, Rank
from hangdoctor.waits import ThreadState

LABELS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("labels.toml").read_text(encoding="utf-8")
)
# Waits that take seconds in a healthy step: no movement for less than PATIENCE_S proves little.
SLOW_KINDS = (
    "data", "http", "rpc", "subprocess", "checkpoint", "file", "future", "queue", "socket", "join", "load", "import",
)  # fmt: skip
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


def make_verdict(
    label: Label,
    level: Confidence,
    culprits: Sequence[Rank | Process],
    summary: str,
    evidence: tuple[Evidence, ...],
    variant: str = "",
    steps: tuple[NextStep, ...] | None = None,
    kind: Kind = "",
) -> Verdict:
    """Return a verdict with the texts of its label, or of a variant of it in labels.toml."""
    ranks = ranks_of(culprits)
    refute = tuple(LABELS[label].get(variant, {}).get("refute", LABELS[label]["refute"]))
    found = steps_of(label, variant) if steps is None else steps
    return Verdict(label, level, ranks, summary, evidence, found, refute, kind)


def steps_of(label: Label, variant: str = "") -> tuple[NextStep, ...]:
    row = LABELS[label]
    return tuple(NextStep(**step) for step in row.get(variant, row).get("steps", row["steps"]))


def confidence(
    case: Case, graph: Graph, culprits: Sequence[Process], best: Confidence = "high"
) -> Confidence:
    """Return the highest level that this case allows; `best` is that of the pattern alone."""
    level = LEVELS.index(best)
    if case.num_samples < 2:
        level = min(level, 1)
    elif any(process.moved for process in culprits):
        level -= 1
    if case.span_s < PATIENCE_S and any(process.wait.kind in SLOW_KINDS for process in culprits):
        level = min(level, 1)
    if any(process.works or in_short_sleep(case, process) for process in culprits):
        level = 0
    if any(s.arrived or s.wait.operation.endswith("(inferred)") for s in case.ranks):
        level = 0
    unseen = any(status in ("not_permitted", "not_python", "timed_out") for status in case.missing.values())
    if len(case.ranks) < 2 or unseen or (case.missing and not case.lost):
        level -= 1
    mine = {process.name for process in culprits}
    sources = {process.name for process in graph.source_ranks}
    if mine and sources - mine and sources & mine:
        level -= 1
    return LEVELS[0 if waiters_move(graph) else max(level, 0)]


def in_short_sleep(case: Case, process: Process) -> bool:
    """True if a process sleeps uninterruptibly, and the samples are too close to distinguish slow
    storage from storage that is gone.
    """
    asleep = process.facts.state == UNINTERRUPTIBLE
    return asleep and case.num_samples > 1 and 0 < case.span_s < DISK_PATIENCE_S


def waiters_move(graph: Graph) -> bool:
    """True if most of the ranks that wait for others made progress between the samples: then
    nothing blocks them.
    """
    return sum(1 for s in graph.waiting_ranks if s.moved) * 2 > len(graph.waiting_ranks)


# Words.


def ranks_of(culprits: Sequence[Rank | Process]) -> tuple[Rank, ...]:
    """Return the ranks of some processes in order, names last; ranks stay in their order."""
    if not any(isinstance(one, Process) for one in culprits):
        return tuple(culprits)  # type: ignore[arg-type]
    ranks = [one.rank for one in culprits if isinstance(one, Process) and one.rank is not None]
    return tuple(sorted(ranks, key=lambda rank: (isinstance(rank, str), rank)))


def name_ranks(processes: Sequence[Process]) -> str:
    found = ranks_of(processes)
    if len(found) == 1:
        return f"rank {found[0]}" if isinstance(found[0], int) else str(found[0])
    return f"ranks {rank_ranges(found)}"


def begin(text: str) -> str:
    """Return the beginning of a sentence; the name of a process stays as it is."""
    return f"R{text[1:]}" if text.startswith(("rank ", "ranks ")) else text


def ranks_text(ranks: Iterable[Rank]) -> str:
    found = list(ranks)
    return f"{'rank' if len(found) == 1 else 'ranks'} {rank_ranges(found)}"


def plural(things: Sequence[object], one: str, many: str) -> str:
    """Return `one` for a single thing, else `many`."""
    return one if len(things) == 1 else many


def wait_in(processes: Sequence[Process]) -> str:
    """Return who waits in what: `ranks 0-2 wait in all_reduce`."""
    return f"{name_ranks(processes)} {plural(processes, 'waits', 'wait')} in {operation(processes[0])}"


def place(process: Process) -> str:
    """Return the place in the user's program where a process is, as a phrase."""
    frame = process.wait.chain[0] if process.wait.chain else process.wait.frame
    return show(frame) if frame else "no frame of the program"


def waiting_for(graph: Graph) -> str:
    return wait_in(graph.waiting[0].members) if graph.waiting else "no peer waits for it"


def operation(process: Process) -> str:
    """Return the operation that a process waits in, as a phrase."""
    wait = process.wait
    return {
        "device": "a synchronisation with the device",
        "backward": "the backward pass",
        "store": f"the store ({wait.operation})",
    }.get(wait.kind, wait.operation or wait.kind)


def apart(graph: Graph, odd: Sequence[Process]) -> str:
    """Return where each cluster of waiting ranks is, those of `odd` first, as one clause each."""
    names = {process.name for process in odd}
    clusters = sorted(graph.waiting, key=lambda c: names.isdisjoint(m.name for m in c.members))
    clauses = [f"{wait_in(c.members)} at {place(c.members[0])}" for c in clusters[:MAX_CLAUSES]]
    if rest := [member for c in clusters[MAX_CLAUSES:] for member in c.members]:
        clauses.append(f"{name_ranks(rest)} {plural(rest, 'waits', 'wait')} elsewhere")
    text = ", while ".join([clauses[0], " and ".join(clauses[1:])]) if clauses[1:] else clauses[0]
    return text[0].upper() + text[1:]


# Evidence.


def evidence_of(process: Process, fact: str, thread: str, frame: Frame | None) -> Evidence:
    """Return a fact about a thread of a process, and the frame that shows it."""
    return Evidence(
        ranks=str(process.rank if process.rank is not None else ""),
        fact=fact,
        process=process.name,
        thread=thread,
        frame=frame.function if frame else "",
        location=location_of(frame),
    )


def stack_evidence(
    processes: Sequence[Process], fact: str, graph: Graph | None = None
) -> tuple[Evidence, ...]:
    """Return one line per culprit (at most eight) with the frame that shows the wait and where its
    path diverges from its peers'.
    """
    found = []
    peers = [c.members[0].wait.frames for c in graph.waiting[:8]] if graph else []
    for process in processes[:MAX_EVIDENCE]:
        frames = process.wait.frames
        others = [p for p in peers if p is not frames]
        fork = first_divergent(frames, others) if others and frames else None
        diverges = f"; its path diverges from its peers' at {show(fork)}" if fork else ""
        found.append(evidence_of(process, fact + diverges, process.thread, process.wait.frame))
    return tuple(found)


def apart_evidence(graph: Graph, odd: Sequence[Process]) -> tuple[Evidence, ...]:
    """Return one line per rank of `odd` (at most eight) with the operation it waits in."""
    return tuple(
        e for s in odd[:MAX_EVIDENCE] for e in stack_evidence([s], f"waits in {operation(s)}", graph)
    )


def thread_evidence(process: Process, thread: ThreadState, fact: str) -> Evidence:
    what = f"{fact} {thread.wait.operation or thread.wait.kind}"
    return evidence_of(process, what, thread.thread, thread.wait.frame)


def waiting_evidence(graph: Graph, culprits: Sequence[Process] = ()) -> tuple[Evidence, ...]:
    """Return one line per place where ranks wait for others; places where only culprits wait are
    covered already.
    """
    found = []
    blamed = {process.name for process in culprits}
    for cluster in [c for c in graph.waiting if not blamed.issuperset(m.name for m in c.members)][:4]:
        first, frame = cluster.members[0], cluster.wait.frame
        site = f" called from {show(cluster.wait.chain[0])}" if cluster.wait.chain else ""
        fact = f"{plural(cluster.members, 'waits', 'wait')} in {operation(first)}{site}"
        shown = frame.function if frame else ""
        found.append(
            Evidence(cluster.ranks, fact, thread=first.thread, frame=shown, location=location_of(frame))
        )
    return tuple(found)


def stillness(case: Case) -> tuple[Evidence, ...]:
    """Return what the samples show about movement."""
    moved, fact = [s for s in case.ranks if s.moved], f"no rank moved between the {case.num_samples} samples"
    if case.num_samples < 2:
        fact = "one sample only: it cannot distinguish slow from stuck"
    elif moved:
        fact = f"{len(case.ranks) - len(moved)} of {len(case.ranks)} ranks stood still in all {case.num_samples} samples; these moved"
    return (Evidence(rank_ranges(ranks_of(moved)) if case.num_samples > 1 else "", fact),)


def behind_by_steps(case: Case) -> tuple[tuple[int, ...], str]:
    """Return the ranks that have logged one step less than the others, and the finding as text.

    Logs count only where they hold the same lines up to there: some ranks log other steps, or none.
    """
    steps = case.snapshot.steps
    last = max((found[-1] for found in steps.values()), default=0)
    ahead = sorted(rank for rank, found in steps.items() if found[-1] == last)
    behind = sorted(set(steps) - set(ahead))
    known = steps[ahead[0]][:-1] if behind else ()
    if not behind or any(steps[rank][-2:] != known[-2:] for rank in behind):
        return (), ""
    return tuple(behind), f"last logged step {known[-1]}, while {ranks_text(ahead)} logged step {last}"


def child_evidence(case: Case, processes: Sequence[Process], what: str) -> tuple[Evidence, ...]:
    """Return what the child processes that may be waited for are in."""
    pairs = [(process, child) for process in processes[:4] for child in case.children_of(process.name)[:4]]
    return tuple(
        Evidence(
            str(process.rank),
            f"{what} {child.wait.operation or child.wait.kind}"
            + (f" at {show(child.wait.frame)}" if child.wait.frame else ""),
            child.name,
            child.thread,
        )
        for process, child in pairs
    )
