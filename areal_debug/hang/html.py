"""A post-mortem as one HTML file: verdict, rank grid, merged stacks, every raw stack.

The file opens from a mail attachment on a machine without a network; there is no script in it.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from areal_core.safety.printable import printable
from areal_debug.hang.tree import PART_NAMES, exit_status, headline, merged_tree, sections, tree_lines
from areal_debug.report.frame import Frame, Link, framed
from areal_debug.report.page import body_of
from hangdoctor.graph import rank_ranges
from hangdoctor.model import Diagnosis, ProcessDump, Snapshot, Thread

MAX_CELLS = 20_000
MAX_TREE_LINES = 4000
MAX_DUMPS = 1536
MAX_EVENTS = 200
VERDICTS = {0: "not hung", 1: "hung", 2: "unknown"}


def page(
    diagnosis: Diagnosis, snapshot: Snapshot, run: str = "saved stacks", links: Sequence[Link] = ()
) -> str:
    """Return the complete page; `run` and `links` are for its header."""
    verdict = VERDICTS[exit_status(diagnosis)]
    facts = {
        "verdict": verdict,
        "heading": f"{headline(diagnosis)} ({diagnosis.confidence} confidence)",
        "summary": diagnosis.summary,
        "culprits": rank_ranges(diagnosis.culprit_ranks),
        "victims": rank_ranges(diagnosis.victim_ranks),
        "ranks": diagnosis.ranks,
        "most_ranks": MAX_CELLS,
        "names": PART_NAMES,
        "used": list(dict.fromkeys(cell.part for cell in diagnosis.ranks)),
        "tree": shown_tree(diagnosis),
        "sections": [(title, lines) for title, lines in sections(diagnosis) if lines],
        "events": [(when(at), text) for at, text in events(snapshot)],
        "stacks": raw_stacks(snapshot),
        "more_dumps": max(0, len(snapshot.dumps) - MAX_DUMPS),
    }
    frame = Frame(f"{diagnosis.label}: {diagnosis.summary[:80]}", run, "hang", verdict, links)
    return framed(frame, body_of("hang/hang.html", facts), style=own_style())


@cache
def own_style() -> str:
    return (Path(__file__).parent / "hang.css").read_text(encoding="utf-8")


def shown_tree(diagnosis: Diagnosis) -> str:
    """Return the merged stacks as the terminal shows them, without a limit for a screen."""
    lines = tree_lines(merged_tree(diagnosis.groups))[:MAX_TREE_LINES]
    return "\n".join(
        f"{'  ' * line.indent}{'* ' if line.fork else ''}{line.text}{f'  [{line.ranks}]' if line.ranks else ''}"
        for line in lines
    )


def events(snapshot: Snapshot) -> list[tuple[float, str]]:
    """Return the timeline: samples, the last collective of each rank, exceptions of error files."""
    found: dict[tuple[float, str], None] = {}
    for dump in snapshot.dumps:
        if dump.time is not None:
            found[(dump.time, f"sample {dump.sample}")] = None
    latest = {record.rank: record for record in snapshot.records if record.created_ns}
    for rank, record in list(latest.items())[:64]:
        text = f"rank {rank} enqueued {record.operation} number {record.sequence} of group {record.group} ({record.state})"
        found[((record.created_ns or 0) / 1e9, text)] = None
    for error in snapshot.errors:
        if error.time is not None:
            found[(error.time, f"rank {error.rank} failed: {error.message[:300]}")] = None
    return sorted(found)[:MAX_EVENTS]


def when(seconds: float) -> str:
    """Format seconds since the epoch as UTC."""
    if not 0 < seconds < 4e9:
        return f"{seconds:.3f}"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def raw_stacks(snapshot: Snapshot) -> list[tuple[str, int, str]]:
    """Return whose, in which sample, and text of every dump; processes with equal threads share
    one.
    """
    shared: dict[tuple[int, tuple[Thread, ...]], list[ProcessDump]] = {}
    for dump in snapshot.dumps[:MAX_DUMPS]:
        shared.setdefault((dump.sample, dump.threads), []).append(dump)
    return [
        (names_of(dumps), sample, "\n\n".join(thread_text(thread) for thread in threads[:200]))
        for (sample, threads), dumps in shared.items()
    ]


def names_of(dumps: Sequence[ProcessDump]) -> str:
    """Return trainer ranks as ranges, other processes by name."""
    ranks = rank_ranges(d.rank for d in dumps if d.rank is not None and d.name == f"rank_{d.rank}")
    names = [d.name for d in dumps if d.name != f"rank_{d.rank}"]
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(([f"rank {ranks}"] if ranks else []) + names[:20]) + more


def thread_text(thread: Thread) -> str:
    state = "".join(word for flag, word in ((thread.active, " active"), (thread.holds_gil, " gil")) if flag)
    lines = [f"Thread {thread.name or '(unnamed)'}{state}"]
    lines += [f"    {f.function} ({f.file}{f':{f.line}' if f.line else ''})" for f in thread.frames[:400]]
    return "\n".join(printable(line) for line in lines)
