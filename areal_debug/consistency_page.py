"""A check of logprobs as one HTML page without scripts or network: the verdict first, then why, then curves and the worst tokens."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from areal_debug.consistency_output import left_out, load_decode, rescoring_rows, summary_of, text_of
from areal_debug.render import format_number
from consistency.check import Checked, Request
from consistency.groups import Group
from consistency.measure import ALIASES
from consistency.report import Gate, WorstToken, describe_worst

WIDTH, HEIGHT, MARGIN = 360, 170, 24
NUM_DOTS = 1500
CURVES = (
    ("response_position", "mean |D| by position in the response"),
    ("surprisal_decile", "mean |D| by decile of surprisal, likeliest tokens first"),
    ("turn", "mean |D| by turn"),
    ("version", "mean |D| by weight version"),
    ("worker", "mean |D| by worker"),
    ("length", "mean |D| by length of the completion"),
)


@dataclass(frozen=True)
class Chart:
    """A picture and what it shows."""

    svg: Markup
    caption: str


def write_page(
    file: Path, checked: Checked, gates: Sequence[Gate], request: Request, told: dict[str, Any]
) -> None:
    """Write the page, whole or not at all."""
    pages = Environment(
        loader=PackageLoader("areal_debug", "pages"), autoescape=True, undefined=StrictUndefined
    )
    text = pages.get_template("consistency.html").render(page_facts(checked, gates, request, told))
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.rename(file)


def page_facts(
    checked: Checked, gates: Sequence[Gate], request: Request, told: dict[str, Any]
) -> dict[str, Any]:
    """What the page's template names."""
    found = checked.diagnosis
    headline, summary = summary_of(checked)
    decode = load_decode(request.model)
    return {
        "verdict": found.verdict,
        "headline": headline,
        "summary": ". ".join(filter(None, (summary, left_out(checked)))),
        "told": [
            f"{name}: {', '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"
            for name, value in told.items()
        ],
        "causes": found.causes,
        "missing": found.missing,
        "gates": gates,
        "rescoring": [] if checked.rescoring is None else rescoring_rows(checked.rescoring),
        "charts": charts(checked),
        "worst": [worst_facts(token, decode) for token in describe_worst(checked, count=30)],
        "metrics": [
            {"name": name, "value": format_number(value), "elsewhere": "; ".join(ALIASES.get(name, ()))}
            for name, value in found.measurement.metrics.items()
        ],
        "identities": found.measurement.identities,
    }


def worst_facts(token: WorstToken, decode: Callable[[list[int]], str] | None) -> dict[str, str]:
    """A token's row, as text."""

    def listed(top: Sequence[tuple[int, float]]) -> str:
        return "\n".join(f"{text_of([i], decode)} {logprob:.2f}" for i, logprob in top)

    return {
        "sequence": str(token.sequence),
        "position": str(token.position),
        "engine": f"{token.engine:.4g}",
        "trainer": f"{token.trainer:.4g}",
        "rank": str(token.rank),
        "before": text_of(list(token.before), decode),
        "text": text_of([token.token_id], decode),
        "engine_top": listed(token.engine_top),
        "top": listed(token.top),
    }


def charts(checked: Checked) -> list[Chart]:
    """Histogram, both sides against each other, and a curve for every column with more than one group."""
    table, measured = checked.diagnosis.table, checked.diagnosis.measurement
    edges = [edge for edge, _ in measured.histogram]
    counts = [math.log1p(count) for _, count in measured.histogram]
    every = max(1, len(table.engine) // NUM_DOTS)
    found = [
        Chart(
            bars(counts, format_number(edges[0]), format_number(-edges[0])),
            "tokens by D (logarithmic count)",
        ),
        Chart(
            dots(table.trainer[::every], table.engine[::every]),
            "logprob of the engine over that of the trainer; on the line they agree",
        ),
    ]
    for column, caption in CURVES:
        groups = measured.by.get(column, ())
        if len(groups) > 1:
            found.append(curve(groups, caption))
    return found


def curve(groups: Sequence[Group], caption: str) -> Chart:
    """Bars of mean |D|."""
    sizes = [group.mean_abs for group in groups]
    ends = (str(groups[0].key), str(groups[-1].key))
    return Chart(bars(sizes, *ends), f"{caption}; largest {format_number(max(sizes))}")


def bars(values: Sequence[float], first: str, last: str) -> Markup:
    """Bars from 0 to the largest value, with a label at either end."""
    top = max(values) or 1.0
    step = (WIDTH - 2 * MARGIN) / len(values)
    drawn = [
        f'<rect class="bar" x="{MARGIN + i * step:.1f}" y="{HEIGHT - MARGIN - (tall := (HEIGHT - 2 * MARGIN) * value / top):.1f}" '
        f'width="{max(step - 1, 0.6):.1f}" height="{tall:.1f}"/>'
        for i, value in enumerate(values)
    ]
    return framed("".join(drawn), first, last)


def dots(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> Markup:
    """A square of points with both axes alike, and the line on which they are equal."""
    low = float(min(x.min(), y.min(), -1e-6))
    across, down = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    points = [
        f'<circle class="dot" cx="{MARGIN + across * (1 - a / low):.1f}" cy="{MARGIN + down * b / low:.1f}" r="1.6"/>'
        for a, b in zip(x.tolist(), y.tolist(), strict=True)
    ]
    even = f'<line class="even" x1="{MARGIN}" y1="{HEIGHT - MARGIN}" x2="{WIDTH - MARGIN}" y2="{MARGIN}"/>'
    return framed(even + "".join(points), format_number(low), "0")


def framed(inside: str, first: str, last: str) -> Markup:
    """A picture with a ground line and its two labels; `inside` is ours, the labels are escaped."""
    ground = HEIGHT - MARGIN
    return Markup(
        '<svg viewBox="0 0 {0} {1}" role="img">{2}<line class="axis" x1="{3}" y1="{4}" x2="{5}" y2="{4}"/>'
        '<text x="{3}" y="{6}">{7}</text><text x="{5}" y="{6}" text-anchor="end">{8}</text></svg>'
    ).format(WIDTH, HEIGHT, Markup(inside), MARGIN, ground, WIDTH - MARGIN, HEIGHT - 8, first, last)
