"""Write the doctor's findings as one HTML page without scripts or network access."""

from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from areal_core.safety.html_page import Frame
from areal_debug.doctor.alarm import Alarm
from areal_debug.doctor.examine import Examination
from areal_debug.doctor.examine import verdict as verdict_of
from areal_debug.doctor.read import Run
from areal_debug.doctor.render import override_lines
from areal_debug.doctor.series import Series
from areal_debug.pages.charts import line
from areal_debug.pages.template import write_template
from areal_debug.render import format_number

MOST_POINTS = 500


def write_page(file: Path, run: Run, found: Examination) -> None:
    """Write the page atomically."""
    checked = [(name, series) for name, series in run.series.items() if len(series.finite.values)]
    verdict = found.alarms[0].severity if found.alarms else verdict_of(run, found)
    headline = (
        found.alarms[0].title.capitalize()
        if found.alarms
        else {"healthy": "No problem found", "unknown": "Inconclusive"}[verdict]
    )
    facts = {
        "verdict": verdict,
        "headline": headline,
        "summary": ". ".join(
            filter(
                None,
                (f"{run.num_steps} steps of {run.source}, names of {run.family}", run.choice, *run.notes),
            )
        ),
        "alarms": [alarm_facts(run, alarm) for alarm in found.alarms],
        "overrides": override_lines(found),
        "charts": [
            {"svg": picture(series), "caption": f"{name.replace('_', ' ')}: {series.name}"}
            for name, series in checked
        ],
        "absent": [name.replace("_", " ") for name in found.absent],
    }
    frame = Frame(headline, run.source, "doctor", verdict)
    write_template(file, "doctor/doctor.html", frame, facts)


def alarm_facts(run: Run, alarm: Alarm) -> dict[str, Any]:
    """Collect the values of the template, with the evidence marked in the curve."""
    steps = {step for step, _ in alarm.evidence}
    evidence = ", ".join(f"step {step}: {format_number(value)}" for step, value in alarm.evidence)
    return vars(alarm) | {"evidence": evidence, "svg": picture(run.by_name[alarm.metric], steps)}


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
    low, high = format_number(min(values)), format_number(max(values))
    marked = [i for i, step in enumerate(steps) if step in marked_steps]
    return line(steps, values, f"step {steps[0]}", f"step {steps[-1]}; values {low} to {high}", marked)
