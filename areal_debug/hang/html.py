"""A post-mortem as one HTML file: verdict, rank grid, merged stacks as an icicle plot, every raw
stack.

The width of a node in the icicle plot is its number of ranks. The file opens from a mail attachment
on a machine without a network; there is no script in it.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from areal_debug.hang.tree import PART_NAMES, Line, Node, exit_status, headline, merged_tree, sections
from areal_debug.report.frame import Frame, Link, framed, lead, safe
from hangdoctor.graph import rank_ranges
from hangdoctor.model import Diagnosis, ProcessDump, RankVerdict, Snapshot, Thread

MAX_CELLS = 20_000
MAX_NODES = 4000
MAX_RAW_PROCESSES = 512
MAX_EVENTS = 200
VERDICTS = {0: "not hung", 1: "hung", 2: "unknown"}


def page(
    diagnosis: Diagnosis, snapshot: Snapshot, run: str = "saved stacks", links: Sequence[Link] = ()
) -> str:
    """Return the complete page; `run` and `links` are for its header."""
    parts = [
        verdict(diagnosis),
        heading("Ranks", grid(diagnosis.ranks)),
        heading("Stacks merged, width is ranks", icicle(diagnosis)),
        *(heading(title, rows(map(cells, lines))) for title, lines in sections(diagnosis)),
        heading("Timeline", rows((when(at), safe(text)) for at, text in events(snapshot))),
        heading("Raw stacks", raw_stacks(snapshot)),
    ]
    frame = Frame(
        f"{diagnosis.label}: {diagnosis.summary[:80]}", run, "hang", VERDICTS[exit_status(diagnosis)], links
    )
    style = own_style() + width_rules(merged_tree(diagnosis.groups))
    return framed(frame, "\n".join(part for part in parts if part), style=style)


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


def heading(title: str, body: str) -> str:
    """Return a section, or an empty string without a body."""
    return f'<section aria-label="{title}"><h2>{title}</h2>\n{body}</section>' if body else ""


def rows(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a table of two columns, or an empty string without rows."""
    body = "".join(f"<tr><td>{left}</td><td>{right}</td></tr>" for left, right in pairs)
    return f'<table class="facts">{body}</table>' if body else ""


def cells(line: Line) -> tuple[str, str]:
    """Return the two cells of a line: whom or what it is about, and what it says."""
    head = f"<code>{safe(line.head)}</code>" if line.is_code else safe(line.head[:60])
    where = f"<br><code>{safe(line.where)}</code>" if line.where else ""
    return head, safe(line.text) + where


def verdict(diagnosis: Diagnosis) -> str:
    """Return label, confidence, summary, culprits and victims."""
    who = " · ".join(
        f"{name} {safe(rank_ranges(ranks))}"
        for name, ranks in (("culprits", diagnosis.culprit_ranks), ("victims", diagnosis.victim_ranks))
        if ranks
    )
    first = lead(
        VERDICTS[exit_status(diagnosis)],
        f"{headline(diagnosis)} ({diagnosis.confidence} confidence)",
        diagnosis.summary,
    )
    return first + (f'<p class="who">{who}</p>' if who else "")


def grid(ranks: Sequence[RankVerdict]) -> str:
    """Return one cell per rank; small ones where there are many."""
    if not ranks:
        return ""
    cells = "".join(
        f'<div class="cell {cell.part}" title="{safe(f"{cell.rank}: {PART_NAMES[cell.part]}, {cell.doing}")}">'
        f"{safe(str(cell.rank)[-4:])}</div>"
        for cell in ranks[:MAX_CELLS]
    )
    more = f"<p class='who'>and {len(ranks) - MAX_CELLS} more ranks</p>" if len(ranks) > MAX_CELLS else ""
    used = dict.fromkeys(cell.part for cell in ranks)
    legend = "".join(f'<i class="{part}"></i>{PART_NAMES[part]}' for part in used)
    small = " small" if len(ranks) > 512 else ""
    label = f"{len(ranks)} ranks by what they do"
    return (
        f'<div class="ranks{small}" role="img" aria-label="{label}">{cells}</div>{more}'
        f'<div class="legend">{legend}</div>'
    )


def icicle(diagnosis: Diagnosis) -> str:
    """Return the merged tree, outermost call on top; a node is as wide as its share of ranks."""
    blamed = {rank_ranges([rank]) for rank in diagnosis.culprit_ranks} | {
        rank_ranges(diagnosis.culprit_ranks)
    }
    nodes = merged_tree(diagnosis.groups)
    left = [MAX_NODES]
    return f'<div class="icicle">{row(nodes, blamed, left)}</div>' if nodes else ""


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


def raw_stacks(snapshot: Snapshot) -> str:
    """Return every dump in a collapsed element; processes with equal threads share one."""
    shared: dict[tuple[int, tuple[Thread, ...]], list[ProcessDump]] = {}
    for dump in snapshot.dumps[: MAX_RAW_PROCESSES * 3]:
        shared.setdefault((dump.sample, dump.threads), []).append(dump)
    blocks = []
    for (sample, threads), dumps in shared.items():
        names = names_of(dumps)
        body = "\n\n".join(thread_text(thread) for thread in threads[:200])
        blocks.append(
            f"<details><summary>{safe(names)}, sample {sample}</summary><pre>{body}</pre></details>"
        )
    if len(snapshot.dumps) > MAX_RAW_PROCESSES * 3:
        blocks.append(
            f"<p class='who'>and {len(snapshot.dumps) - MAX_RAW_PROCESSES * 3} more dumps in the collection</p>"
        )
    return "".join(blocks)


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
    return "\n".join(safe(line) for line in lines)
