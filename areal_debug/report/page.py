"""Show a report, or a template of a verb's own, as one HTML page, written atomically."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from areal_core.safety.durable import commit_file
from areal_core.safety.printable import printable_block
from areal_debug.report.charts import line
from areal_debug.report.frame import Frame, badge, framed, hash_source, lead
from areal_debug.report.model import Block, Curve, Facts, Finding, Picture, Report, Styled, Table, tone_of

STYLE_ELEMENT = re.compile(r"<style>(.*?)</style>", re.DOTALL)
PACKAGE = Path(__file__).parents[1]  # templates are stored next to the verbs that fill them
MOST_POINTS = 500


def write_report(file: Path, report: Report, frame: Frame, *, summary: str = "", style: str = "") -> None:
    repeats = report.verdict.lower() == frame.verdict.lower()  # the badge has it
    heading = report.sentence if repeats else f"{report.verdict}: {report.sentence}".rstrip(": ")
    facts = {"report": report, "verdict": frame.verdict, "heading": heading, "summary": summary}
    facts["blocks"] = list(page_blocks(report.blocks))
    write_template(file, "report/report.html", frame, facts, style=style)


def page_blocks(blocks: Sequence[Block]) -> Iterator[dict[str, Any]]:
    """Yield the blocks of a page, with their kind; curves and pictures in a row are one grid."""
    figures: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, Curve | Picture) and not getattr(block, "wide", False):
            figures.append(figure_of(block))
            continue
        if figures:
            yield {"kind": "figures", "value": figures, "wide": False}
            figures = []
        match block:
            case Picture():
                yield {"kind": "figures", "value": [figure_of(block)], "wide": True}
            case Finding():
                drawn = "" if block.curve is None else chart(block.curve)
                yield {"kind": "finding", "value": block, "svg": drawn}
            case Facts():
                yield {"kind": "facts", "value": block}
            case Table() if block.only != "terminal":
                yield {"kind": "table", "value": block}
            case str():
                yield {"kind": "text", "value": block}
            case Styled() | Table():
                continue
    if figures:
        yield {"kind": "figures", "value": figures, "wide": False}


def figure_of(block: Curve | Picture) -> dict[str, Any]:
    if isinstance(block, Picture):
        return {"svg": Markup(block.svg), "caption": block.caption}
    return {"svg": chart(block), "caption": block.caption or block.label}


def chart(curve: Curve) -> Markup:
    """Draw a curve, thinned to `MOST_POINTS` points; marked steps are kept."""
    values, steps = np.asarray(curve.values, np.float64), np.asarray(curve.steps)
    if not len(values):
        return Markup("")
    every = max(1, len(values) // MOST_POINTS)
    kept = np.flatnonzero((np.arange(len(values)) % every == 0) | np.isin(steps, list(curve.marked)))
    x, y = steps[kept].tolist(), values[kept].tolist()
    marked = [i for i, step in enumerate(x) if step in curve.marked]
    ends = (f"{min(y):.3g}", f"{max(y):.3g}")
    return line(x, y, f"step {x[0]}", f"step {x[-1]}", ends, marked)


def write_template(
    file: Path, template: str, frame: Frame, facts: Mapping[str, Any], *, style: str = "", inside: str = ""
) -> None:
    """Write a page.

    Everything in `facts` is made printable and escaped; a name that `facts` lacks is an error.

    Args:
        template: path below `areal_debug`, of the content inside the frame.
        style: rules of this page only.
        inside: a complete page that is shown inside of this one, whose own styles apply.
    """
    body = body_of(template, facts)
    styles = " ".join(hash_source(sheet) for sheet in STYLE_ELEMENT.findall(inside))
    commit_file(file, framed(frame, body, style=style, styles=styles))


def body_of(template: str, facts: Mapping[str, Any]) -> str:
    """Return the content of a page, with everything in `facts` made printable and escaped."""
    pages = Environment(
        loader=FileSystemLoader(PACKAGE), autoescape=True, undefined=StrictUndefined, finalize=shown
    )
    pages.globals = {
        "lead": lambda *texts: Markup(lead(*texts)),
        "badge": lambda verdict: Markup(badge(verdict)),
        "tone_of": tone_of,
    }
    return pages.get_template(template).render(facts)


def shown(value: Any) -> Any:
    """Return text with control codes shown; pictures, which are markup of ours, as they are."""
    return printable_block(value) if isinstance(value, str) and not isinstance(value, Markup) else value
