"""A post-mortem as one HTML file: verdict, rank grid, merged stacks as an icicle plot, every raw
stack.

The width of a node in the icicle plot is its number of ranks. The file opens from a mail attachment
on a machine without a network; there is no script in it.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from markupsafe import Markup

from areal_core.safety.printable import printable
from areal_debug.hang.tree import PART_NAMES, Node, exit_status, headline, merged_tree, sections
from areal_debug.report.frame import Frame, Link, framed, safe
from areal_debug.report.page import body_of
from hangdoctor.graph import rank_ranges
from hangdoctor.model import Diagnosis, ProcessDump, Snapshot, Thread

MAX_CELLS = 20_000
MAX_NODES = 4000
MAX_DUMPS = 1536
MAX_EVENTS = 200
VERDICTS = {0: "not hung", 1: "hung", 2: "unknown"}


def page(
    diagnosis: Diagnosis, snapshot: Snapshot, run: str = "saved stacks", links: Sequence[Link] = ()
) -> str:
    """Return the complete page; `run` and `links` are for its header."""
    verdict = VERDICTS[exit_status(diagnosis)]
    nodes = merged_tree(diagnosis.groups)
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
        "icicle": Markup(icicle(diagnosis, nodes)),
        "sections": [(title, lines) for title, lines in sections(diagnosis) if lines],
        "events": [(when(at), text) for at, text in events(snapshot)],
        "stacks": raw_stacks(snapshot),
        "more_dumps": max(0, len(snapshot.dumps) - MAX_DUMPS),
    }
    frame = Frame(f"{diagnosis.label}: {diagnosis.summary[:80]}", run, "hang", verdict, links)
    return framed(frame, body_of("hang/hang.html", facts), style=own_style() + width_rules(nodes))


@cache
def own_style() -> str:
    return (Path(__file__).parent / "hang.css").read_text(encoding="utf-8")


def width_rules(nodes: Sequence[Node]) -> str:
    """Return a rule for each number of ranks: the policy allows no style in an element."""
    sizes, left = set(), list(nodes)
    while left:
        node = left.pop()
        sizes.add(node.size)
        left += node.children
    return "".join(f".w{size} {{ flex: {size} 1 0; }}\n" for size in sorted(sizes))


def icicle(diagnosis: Diagnosis, nodes: Sequence[Node]) -> str:
    """Return the merged tree, outermost call on top; a node is as wide as its share of ranks."""
    blamed = {rank_ranges([rank]) for rank in diagnosis.culprit_ranks} | {
        rank_ranges(diagnosis.culprit_ranks)
    }
    return row(nodes, blamed, [MAX_NODES])


def row(nodes: Sequence[Node], blamed: set[str], left: list[int]) -> str:
    """Return nodes side by side; `left[0]` counts the nodes that may still be drawn."""
    if not nodes or left[0] <= 0:
        return ""
    forked = len(nodes) > 1
    return f'<div class="row">{"".join(column(node, blamed, left, forked) for node in nodes)}</div>'


def column(node: Node, blamed: set[str], left: list[int], forked: bool) -> str:
    """Return a node with all that it calls; a run of single calls is one column, so that the
    nesting depth is the number of forks.
    """
    frames = []
    top, current = True, node
    while True:
        left[0] -= 1
        kind = " blamed" if current.ranks in blamed else " fork" if forked and top else ""
        label = f"{current.frame}  [{current.ranks}]"
        text = f"{safe(current.frame)} <b>{safe(current.ranks[:60])}</b>" if top else safe(current.frame)
        frames.append(f'<span class="frame{kind}" title="{safe(label)}">{text}</span>')
        if len(current.children) != 1 or current.children[0].size != current.size:
            break
        top, current = False, current.children[0]
    below = row(current.children, blamed, left)
    return f'<div class="node w{node.size}">{"".join(frames)}{below}</div>'


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
