"""Apply all rules to one run; the most severe alarm comes first."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from areal_debug.doctor.alarm import Alarm
from areal_debug.doctor.names import QUANTITIES
from areal_debug.doctor.read import Run
from areal_debug.doctor.rows import worst_place
from areal_debug.doctor.rules import (
    curve,
    drift,
    groups,
    learning,
    mismatch,
    policy,
    resources,
    rewards,
    rollout,
    shift,
    supervised,
    thresholds,
)
from areal_debug.doctor.samples.sample_rules import examine_samples
from areal_debug.doctor.series import FEWEST_STEPS
from areal_debug.report.links import view_command
from recorder import Record

# causes before what follows from them
RULES: tuple[Callable[[Run], Alarm | None], ...] = (
    *groups.RULES,
    *shift.RULES,
    *policy.RULES,
    *drift.RULES,
    *thresholds.RULES,
    *rollout.RULES,
    *mismatch.RULES,
    *rewards.RULES,
    *resources.RULES,
    *learning.RULES,
    *supervised.RULES,
    *curve.RULES,
)

EXIT_CODES = {"problem": 1, "healthy": 0, "unknown": 2}  # of a verdict


@dataclass(frozen=True)
class Examination:
    """The alarms of a run. `absent` are the quantities that it does not log."""

    alarms: tuple[Alarm, ...]
    absent: tuple[str, ...]

    @property
    def overrides(self) -> dict[str, Any]:
        """The config change of the most severe alarm that has one."""
        return next((alarm.overrides for alarm in self.alarms if alarm.overrides), {})


def examine(run: Run) -> Examination:
    """Apply every rule whose metrics the run logs."""
    found = [alarm for rule in RULES if (alarm := rule(run)) is not None]
    for alarm, share in [] if run.record is None else examine_samples(run.record):
        found.append(alarm)
        run.by_name[alarm.metric] = share
    alarms = [alarm if alarm.cost else replace(alarm, cost=cost_since(run, alarm.onset)) for alarm in found]
    alarms.sort(key=lambda alarm: alarm.severity != "error")
    return Examination(tuple(alarms), tuple(name for name in QUANTITIES if name not in run.series))


def cost_since(run: Run, step: int | None) -> str:
    """Return how many steps were trained since a step, and their hours if times were logged."""
    if step is None:
        return ""
    first = min(int(series.steps[0]) for series in run.by_name.values())
    last = max(int(series.steps[-1]) for series in run.by_name.values())
    times = run.series.get("step_time")
    took = times.finite.since(step) if times is not None else None
    hours = ""
    if took is not None and len(took.values):
        hours = f", {float(np.mean(took.values)) * (last - step + 1) / 3600:.2g} h"
    return f"{last - step + 1} of {last - first + 1} steps since then{hours}"


def verdict(run: Run, found: Examination) -> str:
    """Return "problem", "healthy", or "unknown" if no known metric or too few steps were logged."""
    if found.alarms:
        return "problem"
    return "healthy" if run.series and run.num_steps >= FEWEST_STEPS else "unknown"


def document(run: Run, found: Examination) -> dict[str, Any]:
    """Return the complete report as JSON types."""
    return {
        "verdict": verdict(run, found),
        "source": run.source,
        "other_runs": list(run.other_runs),
        "notes": list(run.notes),
        "names_of": run.family,
        "num_steps": run.num_steps,
        "alarms": [asdict(alarm) | {"look": look_at(run, alarm)} for alarm in found.alarms],
        "overrides": found.overrides,
        "judged": {quantity: series.name for quantity, series in run.series.items()},
        "absent": list(found.absent),
        "unknown": list(run.unknown_names),
    }


def look_at(run: Run, alarm: Alarm) -> str:
    """Return the command that shows the first step of an alarm's evidence, at the row to look at.

    Empty if the metrics are not those of a record.
    """
    if run.record is None or not alarm.evidence:
        return ""
    if alarm.samples:
        first = alarm.samples[0]
        return view_command(run.record.path, first.step, first.prompt, first.sample)
    step = alarm.evidence[0][0]
    return view_command(run.record.path, step, *place_in(run.record, step, alarm.metric))


def place_in(record: Record, step: int, metric: str) -> tuple[int | None, int | None, int | None]:
    """Return prompt, sample and token of a metric's extreme in a step; None if unknown."""
    worst = worst_place(record.step(step), metric) if step in record.steps else None
    return (None, None, None) if worst is None else (worst.prompt, worst.sample, worst.token)
