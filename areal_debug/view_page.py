"""The page as one file that asks nobody for anything: style, script and data are in it, and its policy forbids the rest."""

import base64
import re
from functools import cache
from html import escape
from pathlib import Path

from areal_debug.view_data import RunView, StepView, run_json
from areal_debug.view_pack import pack_step

PAGES = Path(__file__).parent / "pages"
SCRIPTS = ("load", "colours", "charts", "table", "sample", "app")
PLACE = re.compile(r"\{(connect|title|style|run|step|script)\}")


def static_page(run: RunView, step: StepView) -> str:
    """The page of one step, with nothing behind it."""
    packed = base64.b64encode(pack_step(step)).decode()
    return filled(f"{run.record}, step {step.step}", "'none'", run, packed)


def served_page(run: RunView) -> str:
    """The page without a step: it asks the server that it came from for `run.json` and `step/N`."""
    return filled(run.record, "'self'", run, "")


def filled(title: str, connect: str, run: RunView, step: str) -> str:
    """The template with its places filled, once each, so that no data is taken for a place."""
    values = {
        "title": escape(title),
        "connect": connect,
        "style": part("view.css"),
        "run": run_json(run).replace("<", "\\u003c"),
        "step": step,
        "script": "\n".join(part(f"view_{name}.js") for name in SCRIPTS),
    }
    return PLACE.sub(lambda place: values[place[1]], part("view.html"))


@cache
def part(name: str) -> str:
    """A file of the page."""
    return (PAGES / name).read_text(encoding="utf-8")
