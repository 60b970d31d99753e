"""Write the answer of `why` as one HTML page without scripts or network access."""

from pathlib import Path
from typing import Any

from areal_debug.diff.render import describe
from areal_debug.report.frame import Frame
from areal_debug.report.page import write_template
from replayer.compare.stages import STAGES
from replayer.why.report import WhyReport

STYLE = """
.stages { display: flex; flex-wrap: wrap; gap: var(--space-2); padding: 0; list-style: none }
.stages li { padding: var(--space-1) var(--space-3); border-radius: var(--round); background: var(--card) }
.stages .differs { background: var(--tint-bad) }
.stages .equal { background: var(--tint-good) }
.text { font-family: var(--mono); white-space: pre-wrap; overflow-wrap: anywhere }
.text mark { background: var(--tint-amber); color: var(--ink) }
dd ul { margin: 0; padding-left: 1.2em }
"""


def write_page(file: Path, report: WhyReport) -> None:
    """Write the page atomically."""
    run = f"{report.left} and {report.right}"
    frame = Frame(report.sentence, run, "why", report.verdict)
    write_template(file, "why/why.html", frame, page_facts(report), style=STYLE)


def page_facts(report: WhyReport) -> dict[str, Any]:
    """Collect the values of the page's template."""
    compared = f"{report.num_compared} of {report.num_shared} common steps compared"
    notes = [*report.also]
    notes += [f"not known: {'; '.join(report.not_known)}"] if report.not_known else []
    notes += [f"not recorded on both sides: {', '.join(report.not_compared)}"] if report.not_compared else []
    return {
        "report": report,
        "heading": report.sentence.partition(": ")[2],
        "summary": f"A is {report.left}, B is {report.right}; {compared}",
        "finding": report.finding,
        "place": report.difference and describe(report.difference),
        "stages": [] if report.difference is None else stages_of(report),
        "texts": [{"name": name, "text": text} for name, text in zip("AB", report.text or (), strict=False)],
        "look": report.look,
        "notes": notes,
    }


def stages_of(report: WhyReport) -> list[dict[str, str]]:
    assert report.difference is not None
    first = STAGES.index(report.difference.stage)
    states = ["equal" if stage in report.equal else "not recorded" for stage in STAGES[:first]]
    return [
        {"name": stage, "state": state}
        for stage, state in zip(STAGES, [*states, "differs", *["follows"] * len(STAGES)], strict=False)
    ]
