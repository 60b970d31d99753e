"""Write the workbench of a run: an overview, and a page for each thing that the run left.

index.html             what was found, with verdicts
steps.html             the steps of each record, with what was found about them
curves.html            every metric over the steps
doctor.html, ...       a page for each finding; a second one of a kind is doctor-2.html
view/RECORD/           samples and tokens of a record
"""

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from areal_debug.doctor.page import picture
from areal_debug.open.find import Found
from areal_debug.open.items import Item, examine
from areal_debug.render import format_number
from areal_debug.report.frame import Frame, Link, tone_of
from areal_debug.report.links import RecordPage, page_address
from areal_debug.report.page import write_template
from recorder.reader import StepSummary, summarise_steps

# Titles of the kinds, in the order of the overview, and the name of a kind's page.
KINDS = {
    "record": ("Records", "view"),
    "metrics": ("Metrics", "doctor"),
    "hang": ("Hangs", "hang"),
    "trace": ("Traces", "trace"),
    "health": ("Inference servers", "servers"),
    "report": ("Reports", "report"),
    "checkpoint": ("Checkpoints", ""),
}
NAMES = {"record": "Tokens", "metrics": "Doctor", "health": "Servers"}  # in the header, if not the title
WORST_FIRST = ("bad", "unsure", "", "good")
MOST_STEPS = 5000
MOST_CURVES = 300


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
    name = run.absolute().name
    write_overview(folder / "index.html", run, items, links_of(items, "index.html"), note)
    if any(item.record is not None for item in items):
        write_steps(folder / "steps.html", name, items, links_of(items, "steps.html"))
    if any(item.metrics is not None for item in items):
        write_curves(folder / "curves.html", name, items, links_of(items, "curves.html"))
    for item in items:
        if item.write is not None:
            item.write(folder / item.page, links_of(items, item.page), record_page(item, items))


def links_of(items: Sequence[Item], current: str) -> list[Link]:
    pages = {"Overview": ["index.html"]}
    if any(item.record is not None for item in items):
        pages["Steps"] = ["steps.html"]
    if any(item.metrics is not None for item in items):
        pages["Curves"] = ["curves.html"]
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
    groups = [
        {
            "id": kind,
            "title": title,
            "items": [item_facts(item) for item in items if item.found.kind == kind],
        }
        for kind, (title, _) in KINDS.items()
        if any(item.found.kind == kind for item in items)
    ]
    verdict = worst_verdict(items)
    counts = ", ".join(f"{len(group['items'])} {str(group['title']).lower()}" for group in groups)
    summary = f"Found in {run}: {counts}" + (f"; {note}" if note else "")
    facts = {"verdict": verdict, "heading": run.absolute().name, "summary": summary, "groups": groups}
    frame = Frame(f"{run.absolute().name}: workbench", run.absolute().name, "workbench", verdict, links)
    write_template(page, "open/overview.html", frame, facts)


def worst_verdict(items: Sequence[Item]) -> str:
    """Return the verdict that matters most, "" if nothing was judged."""
    verdicts = [item.verdict for item in items if item.verdict]
    return min(verdicts, key=lambda verdict: WORST_FIRST.index(tone_of(verdict)), default="")


def item_facts(item: Item) -> dict[str, Any]:
    return {
        "verdict": item.verdict,
        "tone": tone_of(item.verdict),
        "name": item.found.name,
        "address": quote(item.page),
        "summary": item.summary,
        "command": item.command and f"{item.command} {shlex.quote(str(item.found.path))}",
    }


def write_steps(page: Path, run: str, items: Sequence[Item], links: Sequence[Link]) -> None:
    """Write a table of the steps of each record, with what was found about each."""
    records = []
    for item in items:
        if item.record is None:
            continue
        notes: dict[int, dict[str, str]] = {}
        for other in items:
            place = record_page(other, items)
            if place is not None and place.record is item.record:
                for step, title in other.alarms:
                    notes.setdefault(step, {})[title] = other.page
        try:
            steps, problem = summarise_steps(item.record, lambda _: None), ""
        except ValueError as error:
            steps, problem = [], str(error)
        records.append(
            {
                "name": item.found.name,
                "problem": problem,
                "num_left_out": max(0, len(steps) - MOST_STEPS),
                "rows": [step_facts(step, item, notes.get(step.step, {})) for step in steps[-MOST_STEPS:]],
            }
        )
    frame = Frame(f"{run}: steps", run, "steps", "", links)
    write_template(page, "open/steps.html", frame, {"run": run, "records": records})


def step_facts(step: StepSummary, item: Item, notes: dict[str, str]) -> dict[str, Any]:
    reward = None if step.mean_reward is None else format_number(step.mean_reward)
    return asdict(step) | {"reward": reward, "address": page_address(item.page, step.step), "notes": notes}


def write_curves(page: Path, run: str, items: Sequence[Item], links: Sequence[Link]) -> None:
    """Write every metric over the steps, by source and by the name before its last slash."""
    sources = []
    for item in items:
        if item.metrics is None:
            continue
        groups: dict[str, list[dict[str, Any]]] = {}
        series = [one for one in item.metrics.by_name.values() if len(one.finite.values)]
        for one in series[:MOST_CURVES]:
            prefix = "/".join(one.name.split("/")[:-1][:2])
            short = one.name.removeprefix(f"{prefix}/")
            last = format_number(one.finite.values[-1])
            groups.setdefault(prefix, []).append({"svg": picture(one), "name": short, "last": last})
        left_out = max(0, len(series) - MOST_CURVES)
        sources.append({"name": item.found.name, "groups": groups, "num_left_out": left_out})
    frame = Frame(f"{run}: curves", run, "curves", "", links)
    write_template(page, "open/curves.html", frame, {"run": run, "sources": sources})
