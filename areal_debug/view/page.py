"""The page as one file: style, script and data are inline.

Its policy forbids requests, and any script and style but these, which it names by their hashes.
"""

import base64
import hashlib
import re
from functools import cache
from html import escape
from pathlib import Path

from areal_core.safety.printable import printable
from areal_debug.view.data import RunView, StepView, run_json
from areal_debug.view.pack import pack_step

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("load", "colours", "charts", "table", "sample", "app")
PLACEHOLDER = re.compile(r"\{(connect|title|style_hash|style|run|step|script_hash|script)\}")


def static_page(run: RunView, step: StepView) -> str:
    """Return the page of one step, without a server."""
    packed = base64.b64encode(pack_step(step)).decode()
    return filled(f"{run.record}, step {step.step}", "'none'", run, packed)


def served_page(run: RunView) -> str:
    """Return the page without a step: it requests `run.json` and `step/N` from its server."""
    return filled(run.record, "'self'", run, "")


def filled(title: str, connect: str, run: RunView, step: str) -> str:
    """Fill each placeholder of the template once, so that no data is taken for a placeholder."""
    style = page_file("view.css")
    script = "\n".join(['"use strict";', *(page_file(f"{name}.js") for name in SCRIPTS)])
    values = {
        "title": escape(printable(title)),
        "connect": connect,
        "style": style,
        "style_hash": hash_source(style),
        "run": run_json(run).replace("<", "\\u003c"),
        "step": step,
        "script": script,
        "script_hash": hash_source(script),
    }
    return PLACEHOLDER.sub(lambda place: values[place[1]], page_file("view.html"))


def hash_source(text: str) -> str:
    """Return an inline element as a source of a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def page_file(name: str) -> str:
    """Return the text of a file in `assets`."""
    return (ASSETS / name).read_text(encoding="utf-8")
