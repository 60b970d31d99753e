"""Write a log-prob consistency check as one HTML page without scripts or network access."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from areal_debug.consistency.render import left_out, load_decode, look_at, rescoring_rows, summary_of, text_of
from areal_debug.render import format_number
from areal_debug.report.charts import bars, dots
from areal_debug.report.frame import Frame
from areal_debug.report.page import write_template
from consistency.case import Request
from consistency.check import Checked
from consistency.measure import ALIASES, Group
from consistency.report import Gate, WorstToken, describe_worst

NUM_DOTS = 1500
CURVES = (
    ("response_position", "mean |D| by position in the response"),
    ("surprisal_decile", "mean |D| by decile of surprisal, most likely tokens first"),
    ("entropy_decile", "mean |D| by decile of entropy, lowest entropy first"),
    ("turn", "mean |D| by turn"),
    ("version", "mean |D| by weight version"),
    ("worker", "mean |D| by worker"),
    ("length", "mean |D| by length of the completion"),
)


@dataclass(frozen=True)
class Chart:
    """A picture and its caption."""

    svg: Markup
    caption: str


def write_page(
    file: Path, checked: Checked, gates: Sequence[Gate], request: Request, context: dict[str, Any]
) -> None:
    """Write the page atomically."""
    facts = page_facts(checked, gates, request, context)
    frame = Frame(
        facts["headline"], str(context.get("record", "live engine")), "consistency", facts["verdict"]
    )
    write_template(file, "consistency/consistency.html", frame, facts)


def page_facts(
    checked: Checked, gates: Sequence[Gate], request: Request, context: dict[str, Any]
) -> dict[str, Any]:
    """Collect the values of the page's template."""
    found = checked.diagnosis
    headline, summary = summary_of(checked)
    decode = load_decode(request.model)
    worst = describe_worst(checked, count=30)
    looks = look_at(context, worst) or [""] * len(worst)
    return {
        "verdict": found.verdict,
        "headline": headline,
        "summary": ". ".join(filter(None, (summary, left_out(checked), *checked.notes))),
        "context": [
            f"{name}: {', '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"
            for name, value in context.items()
        ],
        "causes": found.causes,
        "missing": found.missing,
        "gates": gates,
        "rescoring": [] if checked.rescoring is None else rescoring_rows(checked.rescoring),
        "charts": charts(checked),
        "kinds": found.measurement.by.get("kind", ()),
        "worst": [
            worst_facts(token, decode) | {"look": look} for token, look in zip(worst, looks, strict=True)
        ],
        "metrics": [
            {"name": name, "value": format_number(value), "elsewhere": "; ".join(ALIASES.get(name, ()))}
            for name, value in found.measurement.metrics.items()
        ],
        "identities": found.measurement.identities,
    }


def worst_facts(token: WorstToken, decode: Callable[[list[int]], str] | None) -> dict[str, str]:
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
    """Draw the histogram, engine against trainer, and a curve per column of several groups."""
    table, measured = checked.diagnosis.table, checked.diagnosis.measurement
    edges = [edge for edge, _ in measured.histogram]
    counts = [math.log1p(count) for _, count in measured.histogram]
    every = max(1, len(table.engine) // NUM_DOTS)
    trainer, engine = table.trainer[::every].tolist(), table.engine[::every].tolist()
    found = [
        Chart(
            bars(counts, format_number(edges[0]), format_number(-edges[0])),
            "tokens by D (logarithmic count)",
        ),
        Chart(
            dots(trainer, engine, format_number(min(*trainer, *engine))),
            "logprob of the engine against that of the trainer; equal on the line",
        ),
    ]
    for column, caption in CURVES:
        groups = measured.by.get(column, ())
        if len(groups) > 1:
            found.append(curve(groups, caption))
    return found


def curve(groups: Sequence[Group], caption: str) -> Chart:
    """Draw mean |D| by group as bars."""
    sizes = [group.mean_abs for group in groups]
    ends = (str(groups[0].key), str(groups[-1].key))
    return Chart(bars(sizes, *ends), f"{caption}; largest {format_number(max(sizes))}")
