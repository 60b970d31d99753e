"""Write the workbench of a run: an overview, and a page for each thing that the run left.

index.html             what was found, with verdicts
doctor.html, ...       a page for each finding; a second one of a kind is doctor-2.html
view/RECORD/           samples and tokens of a record
"""

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

from areal_debug.open.find import Found
from areal_debug.open.items import Item, examine
from areal_debug.report.frame import Frame, Link
from areal_debug.report.links import RecordPage
from areal_debug.report.model import Block, Facts, Finding, Report, Row, tone_of
from areal_debug.report.page import write_report

# Titles of the kinds, in the order of the overview, and the name of a kind's page.
KINDS = {
    "record": ("Records", "view"),
    "metrics": ("Metrics", "doctor"),
    "hang": ("Hangs", "hang"),
    "trace": ("Traces", "trace"),
    "health": ("Inference servers", ""),
    "report": ("Reports", "report"),
    "checkpoint": ("Checkpoints", ""),
}
NAMES = {"record": "Tokens", "metrics": "Doctor"}  # in the header, if not the title
WORST_FIRST = ("bad", "unsure", "", "good")


def read_all(found: Sequence[Found], scratch: Path, tick: Callable[[object], None]) -> list[Item]:
    """Read everything and choose the addresses of the pages; `scratch` is for files of reading."""
    scratch.mkdir()
    counts: Counter[str] = Counter()
    items = []
    for number, one in enumerate(found):
        item = examine(one, scratch / str(number))
        name = KINDS[one.kind][1]
        if item.write is not None:
            counts[name] += 1
            again = f"-{counts[name]}" if counts[name] > 1 else ""
            item.page = f"{name}{again}/index.html" if one.kind == "record" else f"{name}{again}.html"
        items.append(item)
        tick(one)
    return items


def write_workbench(run: Path, items: Sequence[Item], folder: Path, note: str) -> None:
    """Write every page into an empty folder."""
    folder.mkdir()
    write_overview(folder / "index.html", run, items, links_of(items, "index.html"), note)
    for item in items:
        if item.write is not None:
            item.write(folder / item.page, links_of(items, item.page), record_page(item, items))


def links_of(items: Sequence[Item], current: str) -> list[Link]:
    pages = {"Overview": ["index.html"]}
    for kind, (title, _) in KINDS.items():
        of_kind = [item.page for item in items if item.found.kind == kind and item.page]
        if of_kind:
            first = of_kind[0] if len(of_kind) == 1 else f"index.html#{kind}"
            pages[NAMES.get(kind, title)] = [first, *of_kind]
    up = "../" * current.count("/")
    return [Link(title, f"{up}{leads[0]}", current in leads) for title, leads in pages.items()]


def record_page(item: Item, items: Sequence[Item]) -> RecordPage | None:
    """Return the record that an item is about: itself, or the nearest one if there is one such."""
    places = [other.found.path for other in items if other.record is not None and other.page]
    same = [path for path in places if path == item.found.path]
    beside = [path for path in places if path.parent == item.found.path.parent]
    nearest = same or beside or places
    if len(nearest) != 1:
        return None
    other = next(other for other in items if other.record is not None and other.found.path == nearest[0])
    assert other.record is not None
    return RecordPage(other.record, other.page)


def write_overview(page: Path, run: Path, items: Sequence[Item], links: Sequence[Link], note: str) -> None:
    verdict, name = worst_verdict(items), run.absolute().name
    blocks: list[Block] = []
    counts = []
    for kind, (title, _) in KINDS.items():
        of_kind = [item for item in items if item.found.kind == kind]
        if of_kind:
            counts.append(f"{title.lower()}: {len(of_kind)}")
            blocks.append(Facts([], title, kind))
            blocks += [finding_of(item) for item in of_kind]
    summary = f"In {run}: {', '.join(counts)}" + (f"; {note}" if note else "")
    frame = Frame(f"{name}: workbench", name, "workbench", verdict, links)
    write_report(page, Report(verdict, name, tone_of(verdict), blocks), frame, summary=summary)


def finding_of(item: Item) -> Finding:
    """Return an item of the overview, with the link to its page and the verb that prints more."""
    rows = [Row(item.verdict or "found", item.summary, address=quote(item.page))]
    if item.command:
        rows.append(Row("more", f"{item.command} {shlex.quote(str(item.found.path))}", is_code=True))
    return Finding("", item.found.name, tone_of(item.verdict), rows)


def worst_verdict(items: Sequence[Item]) -> str:
    """Return the verdict that matters most, "" if nothing was judged."""
    verdicts = [item.verdict for item in items if item.verdict]
    return min(verdicts, key=lambda verdict: WORST_FIRST.index(tone_of(verdict)), default="")
