"""Print a hang diagnosis: verdict, rank map, tree, evidence, next steps, what would refute it."""

import json
import shutil
from pathlib import Path

import click
from rich.text import Text

from areal_core.safety.durable import commit_file
from areal_core.safety.printable import printable
from areal_debug.hang.tree import (
    PART_NAMES,
    SYMBOLS,
    Line,
    exit_status,
    headline,
    merged_tree,
    sections,
    tree_lines,
)
from areal_debug.render import console
from hangdoctor.graph import rank_ranges
from hangdoctor.model import Diagnosis, Snapshot

STYLES = {
    "culprit": "bold red",
    "victim": "yellow",
    "running": "green",
    "missing": "bold magenta",
    "not_collected": "dim",
    "other": "dim",
}
LEVEL_STYLES = {"high": "bold", "medium": "", "low": "dim"}
VERDICT_STYLES = {0: "bold green", 1: "bold red", 2: "bold"}
MAX_CELLS = 4096
MAX_TREE_LINES = 80


def show_diagnosis(
    diagnosis: Diagnosis,
    snapshot: Snapshot,
    as_json: bool = False,
    html: Path | None = None,
) -> int:
    """Print a diagnosis and write the requested page.

    Returns:
        The exit status: 0 not hung, 1 hung, 2 unknown.
    """
    if html is not None:
        from areal_debug.hang.html import page

        commit_file(html, page(diagnosis, snapshot))
    if as_json:
        click.echo(json.dumps(diagnosis.as_json(), indent=2))
    else:
        width = shutil.get_terminal_size((120, 40)).columns
        console(width=width).print(report(diagnosis, width))
    return exit_status(diagnosis)


def write_post_mortem(diagnosis: Diagnosis, snapshot: Snapshot, folder: Path) -> None:
    from areal_debug.hang.html import page

    commit_file(folder / "post_mortem.html", page(diagnosis, snapshot, folder.absolute().name))


def report(diagnosis: Diagnosis, width: int = 120) -> Text:
    """Return the complete report as styled text; `str()` of it is the plain output."""
    text = Text()
    text.append(headline(diagnosis), VERDICT_STYLES[exit_status(diagnosis)])
    text.append(f"  {diagnosis.confidence} confidence\n", LEVEL_STYLES[diagnosis.confidence])
    text.append(f"{printable(diagnosis.summary)}\n\n")
    for part, ranks in (("culprit", diagnosis.culprit_ranks), ("victim", diagnosis.victim_ranks)):
        if ranks:
            text.append(f"{part + 's':10}", STYLES[part])
            text.append(f"{printable(rank_ranges(ranks))}\n")
    add_rank_map(text, diagnosis, width)
    add_tree(text, diagnosis)
    for title, lines in sections(diagnosis):
        if lines:
            text.append(f"\n{title}\n", "bold")
        for line in lines:
            text.append(f"  {printable(plain_line(title, line))}\n")
    return text


def plain_line(title: str, line: Line) -> str:
    if line.is_code:
        return f"{line.head}   # {line.text}"
    head = line.head or ("-" if title == "Evidence" else "")
    return (f"{head}: " if head else "") + line.text + (f"  {line.where}" if line.where else "")


def add_rank_map(text: Text, diagnosis: Diagnosis, width: int) -> None:
    """Append one character per rank, in rows of up to 64, coloured by role; up to 4,096 ranks."""
    cells = [cell for cell in diagnosis.ranks if isinstance(cell.rank, int)]
    if len(cells) < 2 or len(cells) > MAX_CELLS:
        return
    text.append("\nRanks\n", "bold")
    per_row = min(64, max(8, (width - 10) // 8 * 8))
    for start in range(0, len(cells), per_row):
        text.append(f"{cells[start].rank:>7}  ", "dim")
        for cell in cells[start : start + per_row]:
            text.append(SYMBOLS[cell.part], STYLES[cell.part])
        text.append("\n")
    used = dict.fromkeys(cell.part for cell in cells)
    text.append("         " + "  ".join(f"{SYMBOLS[part]} {PART_NAMES[part]}" for part in used) + "\n", "dim")


def add_tree(text: Text, diagnosis: Diagnosis) -> None:
    lines = tree_lines(merged_tree(diagnosis.groups))
    if not lines:
        return
    text.append("\nStacks, outermost call first; * where ranks diverge\n", "bold")
    for line in lines[:MAX_TREE_LINES]:
        text.append("  " * (line.indent + 1) + ("* " if line.fork else ""))
        text.append(printable(line.text), "bold" if line.fork else "")
        text.append(f"  [{line.ranks}]\n" if line.ranks else "\n", "cyan")
    if len(lines) > MAX_TREE_LINES:
        text.append(f"  ... {len(lines) - MAX_TREE_LINES} more lines: -o FILE.html shows them all\n", "dim")
