"""Apply all rules to one run; the alarm that explains the others comes first."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from areal_debug.doctor.alarm import Alarm, findings
from areal_debug.doctor.checks import Checks, checks_of, unread
from areal_debug.doctor.names import QUANTITIES
from areal_debug.doctor.read import Run
from areal_debug.doctor.rows import NOWHERE, worst_place
from areal_debug.doctor.rules import (
    curve,
    drift,
    extremes,
    groups,
    learning,
    mismatch,
    policy,
    resources,
    rewards,
    rollout,
    shift,
    supervised,
    terms,
    thresholds,
)
from areal_debug.doctor.samples.read import read_rows
from areal_debug.doctor.samples.sample_rules import examine_samples
from areal_debug.doctor.series import FEWEST_STEPS, NOTHING, Series
from areal_debug.doctor.wording import OWN, in_words_of
from areal_debug.report.links import view_command
from recorder import Record

# causes before what follows from them
AREAS = (
    *(groups, shift, policy, drift, thresholds, extremes, rollout, terms, mismatch, rewards, resources),
    *(learning, supervised, curve),
)
RULES: tuple[Callable[[Run], Alarm | None], ...] = tuple(rule for area in AREAS for rule in area.RULES)

ONSET_SHARE = 0.1  # of the run: how exact onsets are
UNBENT_SHARE = 0.5  # of the run: what has no bend has no exact onset
FLAT, BEHIND = (
    {row["titles"][name] for row in findings().values() for name in row.get(key, ())}
    for key in ("no_onset", "behind")
)
EXIT_CODES = {"problem": 1, "healthy": 0, "unknown": 2}  # of a verdict


@dataclass(frozen=True)
class Examination:
    """The alarms of a run, and the state of every check.

    `absent` are the quantities that the run does not log.
    """

    alarms: tuple[Alarm, ...]
    checks: Checks
    absent: tuple[str, ...]

    @property
    def overrides(self) -> dict[str, Any]:
        """The config change of the most severe alarm that has one."""
        return next((alarm.overrides for alarm in self.alarms if alarm.overrides), {})


def examine(run: Run) -> Examination:
    """Apply every rule whose metrics the run logs."""
    found = [alarm for rule in RULES if (alarm := rule(run)) is not None]
    rows = None if run.record is None else read_rows(run.record, run.damage)
    for alarm, share in [] if rows is None else examine_samples(rows):
        found.append(alarm)
        run.by_name[alarm.metric] = share
    alarms = [alarm if alarm.cost else replace(alarm, cost=cost_since(run, alarm.onset)) for alarm in found]
    absent = tuple(name for name in QUANTITIES if name not in run.series)
    alarms = [in_words_of(OWN if run.config else run.family, alarm, run.record, run.unit) for alarm in alarms]
    checks = checks_of(run, rows, list(dict.fromkeys(alarm.id for alarm in alarms)))
    return Examination(tuple(causes_first(alarms, run.span[1] - run.span[0], run.by_name)), checks, absent)


def causes_first(alarms: Sequence[Alarm], num_steps: int, logged: Mapping[str, Series]) -> Iterator[Alarm]:
    """Yield alarms: causes before what follows from them, errors before warnings, early ones first.

    A cause must not begin later than its effect; onsets are exact to a tenth of the run, and to the
    distance of two values of their metric in `logged`, as of two evaluations. A reward
    that never rose, or a loss that never fell, has no onset: what broke later explains it too.
    """
    left = [alarm for alarm in alarms if alarm.title not in BEHIND]
    left.sort(key=lambda alarm: (alarm.severity != "error", alarm.onset or 0))

    def follows(effect: Alarm) -> bool:
        begins = logged.get(effect.metric, NOTHING).steps[:1]
        share = 1 if effect.title in FLAT else UNBENT_SHARE if effect.onset in begins else ONSET_SHARE
        latest = (effect.onset or 0) + share * num_steps
        causes = (cause for cause in left if effect.id in findings()[cause.id].get("leads_to", ()))
        return any((cause.onset or 0) - apart(cause) <= latest for cause in causes)

    def apart(cause: Alarm) -> float:
        steps = logged.get(cause.metric, NOTHING).steps
        return float(np.median(np.diff(steps))) if len(steps) > 1 else 0.0

    while left:
        chosen = next((alarm for alarm in left if not follows(alarm)), left[0])
        left.remove(chosen)
        yield chosen
    yield from (alarm for alarm in alarms if alarm.title in BEHIND)


def cost_since(run: Run, step: int | None) -> str:
    """Return how many steps were trained since a step, and their hours if times were logged."""
    if step is None:
        return ""
    first, last = run.span
    times = run.series.get("step_time")
    took = times.finite.since(step) if times is not None else None
    hours = ""
    if took is not None and len(took.values):
        hours = f", {float(np.mean(took.values)) * (last - step + 1) / 3600:.2g} h"
    return f"{last - step + 1} of {last - first + 1} steps{hours}"


def verdict(run: Run, found: Examination) -> str:
    """Return "problem", "healthy", or "unknown" if too few steps or checks had data."""
    if found.alarms:
        return "unknown" if is_one_step(run, found) else "problem"
    checks = found.checks
    unseen = checks.lacks("whole") or checks.lacks("20") in run.series
    looked = run.num_steps >= FEWEST_STEPS and run.series and not (checks.are_few or unseen)
    return "healthy" if looked and not run.damage.found else "unknown"


def is_one_step(run: Run, found: Examination) -> bool:
    """Return whether one step is all there is: its levels are facts, and no step shows a trend."""
    return run.num_steps == 1 and not any(one.severity == "error" or one.samples for one in found.alarms)


def document(run: Run, found: Examination) -> dict[str, Any]:
    """Return the complete report as JSON types."""
    return {
        "verdict": verdict(run, found),
        "source": run.source,
        "other_runs": list(run.other_runs),
        "notes": list(run.notes),
        "left_out": list(run.damage.found),
        "names_of": run.family,
        "num_steps": run.num_steps,
        "counted_by": run.unit,
        "alarms": [asdict(alarm) | {"look": look_at(run, alarm)} for alarm in found.alarms],
        "overrides": found.overrides,
        "checks": asdict(found.checks),
        "not_read": unread(run),
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
    return worst_place(record.step(step), metric) if step in record.steps else NOWHERE
