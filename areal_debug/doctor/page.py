"""Write the doctor's findings as one HTML page without scripts or network access."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from areal_core.safety.html_page import Frame, Link
from areal_debug.doctor.alarm import Alarm
from areal_debug.doctor.examine import Examination, look_at, place_in
from areal_debug.doctor.examine import verdict as verdict_of
from areal_debug.doctor.names import QUANTITIES
from areal_debug.doctor.read import Run
from areal_debug.doctor.render import override_lines, sample_line, since, unknown_names_of
from areal_debug.doctor.series import Series
from areal_debug.pages.charts import line
from areal_debug.pages.links import RecordPage
from areal_debug.pages.template import write_template
from areal_debug.render import format_number

MOST_POINTS = 500


def write_page(
    file: Path,
    run: Run,
    found: Examination,
    links: Sequence[Link] = (),
    record_page: RecordPage | None = None,
) -> None:
    """Write the page atomically.

    Args:
        links: pages of the same run, for the header.
        record_page: page of the record of this run, for links to the rows behind a finding.
    """
    checked = [(name, series) for name, series in run.series.items() if len(series.finite.values)]
    verdict = found.alarms[0].severity if found.alarms else verdict_of(run, found)
    headline = headline_of(run, found)
    facts = {
        "verdict": verdict,
        "headline": headline,
        "summary": ". ".join((f"{run.num_steps} steps of {run.source}, names of {run.family}", *run.notes)),
        "alarms": [alarm_facts(run, alarm, record_page) for alarm in found.alarms],
        "overrides": override_lines(found),
        "charts": [
            {
                "svg": picture(series),
                "caption": f"{name.replace('_', ' ')}: {series.name}. {QUANTITIES[name]['meaning']}",
            }
            for name, series in checked
        ],
        "absent": [name.replace("_", " ") for name in found.absent],
        "unknown": unknown_names_of(run) if run.unknown_names else "",
    }
    write_template(file, "doctor/doctor.html", Frame(headline, run.source, "doctor", verdict, links), facts)


def headline_of(run: Run, found: Examination) -> str:
    """Return the first alarm, or that there is none."""
    if found.alarms:
        return found.alarms[0].title.capitalize()
    return {"healthy": "No problem found", "unknown": "Inconclusive"}[verdict_of(run, found)]


def alarm_facts(run: Run, alarm: Alarm, record_page: RecordPage | None) -> dict[str, Any]:
    steps = {step for step, _ in alarm.evidence}
    evidence = [
        {
            "text": f"step {step}: {format_number(value)}",
            "address": address_of(record_page, step, alarm.metric),
        }
        for step, value in alarm.evidence
    ]
    return vars(alarm) | {
        "evidence": evidence,
        "look": look_at(run, alarm),
        "since": since(alarm) if alarm.onset is not None else "",
        "samples": [
            {
                "text": sample_line(sample),
                "address": ""
                if record_page is None
                else record_page.address(sample.step, sample.prompt, sample.sample),
            }
            for sample in alarm.samples
        ],
        "svg": picture(run.by_name[alarm.metric], steps),
    }


def address_of(record_page: RecordPage | None, step: int, metric: str) -> str:
    return (
        "" if record_page is None else record_page.address(step, *place_in(record_page.record, step, metric))
    )


def picture(series: Series, marked_steps: set[int] | frozenset[int] = frozenset()) -> Markup:
    """Draw the curve, thinned to `MOST_POINTS` points; marked steps are kept."""
    shown = series.finite
    if not len(shown.values):
        return Markup("")
    every = max(1, len(shown.values) // MOST_POINTS)
    kept = np.flatnonzero(
        (np.arange(len(shown.values)) % every == 0) | np.isin(shown.steps, list(marked_steps))
    )
    steps, values = shown.steps[kept].tolist(), shown.values[kept].tolist()
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    marked = [i for i, step in enumerate(steps) if step in marked_steps]
    return line(steps, values, f"step {steps[0]}", f"step {steps[-1]}", (low, high), marked)
