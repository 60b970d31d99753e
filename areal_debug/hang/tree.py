"""What reports of a diagnosis share: exit code, sections of lines, the merged tree of stacks."""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hangdoctor.graph import rank_ranges
from hangdoctor.model import Diagnosis, Group, Rank

SYMBOLS = {"culprit": "X", "victim": "v", "running": "r", "missing": "?", "not_collected": "-", "other": "."}
PART_NAMES = {part: part.replace("_", " ") for part in SYMBOLS} | {
    "victim": "waits for others",
    "running": "runs",
}


def headline(diagnosis: Diagnosis) -> str:
    """Return the label, with its kind where there is one."""
    if diagnosis.kind == "starting":
        return diagnosis.kind
    return f"{diagnosis.label}, {diagnosis.kind}" if diagnosis.kind else diagnosis.label


def exit_status(diagnosis: Diagnosis) -> int:
    """Return 0 where nothing hangs, 1 for a hang, 2 where the result is inconclusive."""
    if diagnosis.label == "unknown" or diagnosis.confidence == "low" or diagnosis.kind == "starting":
        return 2
    return 0 if diagnosis.label == "straggler_or_not_hung" else 1


class Line(NamedTuple):
    """One line of a section: whom it is about, what it says, and the frame that shows it."""

    head: str
    text: str
    where: str = ""
    is_code: bool = False


def sections(diagnosis: Diagnosis) -> list[tuple[str, list[Line]]]:
    """Return titles and lines of the sections below the stacks."""
    evidence = [
        Line(subject(e.ranks, e.process), e.fact, f"{e.frame} ({e.location})" if e.location else "")
        for e in diagnosis.evidence
    ]
    steps = [
        Line(s.do, s.why + (f" ({s.cost})" if s.cost else ""), is_code=True) for s in diagnosis.next_steps
    ]
    others = [Line(f"{a.label} ({a.confidence})", a.summary) for a in diagnosis.alternatives]
    return [
        ("Evidence", evidence),
        ("Next", steps),
        ("Would refute it", [Line("", text) for text in diagnosis.would_refute]),
        ("Other explanations", others),
        ("Processes", processes(diagnosis)),
        ("To collect", [Line("", text) for text in diagnosis.collect]),
    ]


def processes(diagnosis: Diagnosis) -> list[Line]:
    """Return a line on the process of each rank that is known, culprits first, at most eight."""
    known = [rank for rank in diagnosis.ranks if rank.pid is not None]
    known.sort(key=lambda rank: rank.part != "culprit")
    lines = []
    for rank in known[:8]:
        since = f", since {time.strftime('%H:%M:%S', time.localtime(rank.started))}" if rank.started else ""
        where = f" on {rank.host}" if rank.host else ""
        lines.append(
            Line(subject(str(rank.rank), str(rank.rank)), f"pid {rank.pid}{where}{since}: {rank.command}")
        )
    more = len(known) - len(lines)
    return lines + ([Line("", f"and {more} more: --json lists them")] if more else [])


def subject(ranks: str, process: str) -> str:
    """Return whom a fact is about: its ranks, else its process."""
    return f"rank {ranks}" if ranks[:1].isdigit() else process


@dataclass(frozen=True, slots=True)
class Node:
    """One frame of the merged tree, with the number of processes and the ranks through it."""

    frame: str
    size: int
    ranks: str
    children: tuple["Node", ...]


def merged_tree(groups: Sequence[Group]) -> tuple[Node, ...]:
    """Merge groups from their outermost frames in; the larger branch first."""
    return branches([(group, list(reversed(group.stack))) for group in groups], 0)


def branches(entries: list[tuple[Group, list[str]]], depth: int) -> tuple[Node, ...]:
    """Return the children of a node: one per different frame at `depth`."""
    by_frame: dict[str, list[tuple[Group, list[str]]]] = defaultdict(list)
    for group, stack in entries:
        if depth < len(stack):
            by_frame[stack[depth]].append((group, stack))
    found = [
        Node(
            frame,
            sum(group.size for group, _ in members),
            joined_ranges([group.ranks for group, _ in members]),
            branches(members, depth + 1),
        )
        for frame, members in by_frame.items()
    ]
    return tuple(sorted(found, key=lambda node: (-node.size, node.frame)))


def joined_ranges(texts: list[str]) -> str:
    if len(texts) == 1:
        return texts[0]
    ranks: set[Rank] = set()
    for part in ",".join(texts).split(","):
        first, dash, last = part.partition("-")
        if first.isdigit() and (not dash or last.isdigit()):
            ranks |= set(range(int(first), int(last or first) + 1))
        elif part:
            ranks.add(part)
    return rank_ranges(ranks)


@dataclass(frozen=True, slots=True)
class TreeLine:
    """One printed line of the tree; `fork` marks the first frame below a divergence of ranks."""

    indent: int
    text: str
    ranks: str
    fork: bool


def tree_lines(nodes: Sequence[Node], indent: int = 0) -> list[TreeLine]:
    """Return the lines of the tree, outermost call first. A run of frames that all ranks share is
    not indented deeper; long runs are cut.
    """
    lines: list[TreeLine] = []
    fork = len(nodes) > 1
    for node in nodes:
        run = [node]
        while len(run[-1].children) == 1 and run[-1].children[0].size == run[-1].size:
            run.append(run[-1].children[0])
        shown = run if len(run) <= 8 else [*run[:3], *run[-4:]]
        for place, item in enumerate(shown):
            if len(run) > 8 and place == 3:
                lines.append(TreeLine(indent, f"... {len(run) - 7} more calls", "", False))
            lines.append(TreeLine(indent, item.frame, item.ranks if place == 0 else "", fork and place == 0))
        lines += tree_lines(run[-1].children, indent + 1)
    return lines
