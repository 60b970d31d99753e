"""What the doctor says of a run, for a terminal and for a page."""

import json
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from areal_debug.doctor.alarm import Alarm, Sample
from areal_debug.doctor.checks import Checks, unread
from areal_debug.doctor.examine import Examination, look_at, place_in
from areal_debug.doctor.names import QUANTITIES
from areal_debug.doctor.read import Run
from areal_debug.doctor.series import FEWEST_STEPS, Series
from areal_debug.render import format_number, styled
from areal_debug.report.links import RecordPage
from areal_debug.report.model import Block, Curve, Facts, Finding, Level, Report, Row, rows_of
from areal_debug.report.terminal import STYLES

NAMES_SHOWN = 20
LEVELS: dict[str, Level] = {"error": "bad", "warning": "unsure"}


def report_of(run: Run, found: Examination, record_page: RecordPage | None = None) -> Report:
    """Return the report; `record_page` is where links to the rows behind a finding go."""
    verdict, sentence, level = verdict_of(run, found)
    blocks: list[Block] = [finding_of(run, alarm, record_page) for alarm in found.alarms]
    if found.overrides:
        blocks.append(Facts([Row("", " ".join(override_lines(found)), is_code=True)], "Try first"))
    blocks.append(Facts([], "Metrics checked"))
    blocks += [
        Curve(
            quantity.replace("_", " "),
            series.finite.values.tolist(),
            series.finite.steps.tolist(),
            caption=f"{quantity.replace('_', ' ')}: {series.name}. {QUANTITIES[quantity]['meaning']}",
            ends=f"{format_number(float(series.finite.values[0]))} to {format_number(float(series.finite.values[-1]))}",
        )
        for quantity, series in run.series.items()
        if len(series.finite.values)
    ]
    if found.checks.unobserved:
        blocks.append(unobserved_of(found.checks))
    blocks += [
        f"not read: {name}; to judge it: --metric {quantity}={name}" for name, quantity in unread(run).items()
    ]
    if run.unknown_names:
        blocks.append(unknown_names_of(run))
    return Report(verdict, sentence, level, blocks, run.notes)


def verdict_of(run: Run, found: Examination) -> tuple[str, str, Level]:
    logged_by = f" (metric names of {run.family})" if run.family != "unknown" else ""
    what = f"{run.num_steps} steps of {run.source}{logged_by}"
    if not run.series:
        return "Inconclusive", f"none of the metrics in {what} is known", "unsure"
    if not found.alarms and run.num_steps < FEWEST_STEPS:
        return "Inconclusive", f"{what}, and a trend needs at least {FEWEST_STEPS}", "unsure"
    if not found.alarms and found.checks.are_few:
        tried = f"only {found.checks.num_tried} of {found.checks.num_all} checks had data"
        return "Few checks ran", f"{tried} in {what}", "unsure"
    if not found.alarms and (late := found.checks.late) and late in run.series:
        why = f"the {late} does not change in them, and more steps went before: give those, too"
        return "Inconclusive", f"{what}; {why}", "unsure"
    if not found.alarms and run.damage.found:
        return "Damaged", f"no problem found in the intact steps: {what}", "bad"
    if not found.alarms:
        return "Healthy", f"no problem found in {what}", "good"
    first = found.alarms[0]
    more = f", and {len(found.alarms) - 1} more" if len(found.alarms) > 1 else ""
    return f"{first.title[:1].upper()}{first.title[1:]}{more}", what, LEVELS[first.severity]


def unobserved_of(checks: Checks) -> str:
    """Return one sentence on the checks that had no data, and what each of them needs."""
    by_need: dict[str, list[str]] = {}
    for id, needs in checks.unobserved.items():
        by_need.setdefault(" and ".join(need.replace("|", " or ") for need in needs), []).append(id)
    lacking = "; ".join(f"{need.replace('_', ' ')} ({', '.join(ids)})" for need, ids in by_need.items())
    return (
        f"{checks.num_tried} of {checks.num_all} checks had data, {len(checks.failed)} failed; "
        f"not checked, for want of: {lacking}"
    )


def unknown_names_of(run: Run) -> str:
    """Return one sentence on the metrics that no rule reads, and how to name one of them."""
    names = ", ".join(run.unknown_names[:NAMES_SHOWN])
    more = len(run.unknown_names) - NAMES_SHOWN
    rest = f" and {more} more (--json lists all)" if more > 0 else ""
    return f"logged, but no known quantity: {names}{rest}; to judge one: --metric QUANTITY=NAME"


def finding_of(run: Run, alarm: Alarm, record_page: RecordPage | None) -> Finding:
    """Return an alarm with its curve, its evidence and what to do."""
    evidence = [f"step {step}: {format_number(value)}" for step, value in alarm.evidence]
    first = alarm.evidence[0][0] if alarm.evidence else None
    look = look_at(run, alarm)
    rows = [
        Row("found", alarm.found),
        Row("evidence", ", ".join(evidence), address=address_of(record_page, first, alarm.metric)),
        *([Row("since", since(alarm))] if alarm.onset is not None else []),
        *([Row("look", look, is_code=True)] if look else []),
        *(
            Row("" if i else "samples", sample_line(sample), address=sample_address(record_page, sample))
            for i, sample in enumerate(alarm.samples)
        ),
        *rows_of("advice", [f"{i}. {advice}" for i, advice in enumerate(alarm.advice, start=1)]),
        Row("to confirm", alarm.experiment),
        Row("source", alarm.source),
    ]
    curve = curve_of(run.by_name[alarm.metric], frozenset(step for step, _ in alarm.evidence))
    return Finding(alarm.id, alarm.title, LEVELS[alarm.severity], rows, curve=curve)


def curve_of(series: Series, marked: frozenset[int]) -> Curve:
    kept = series.finite
    return Curve(series.name, kept.values.tolist(), kept.steps.tolist(), marked)


def address_of(record_page: RecordPage | None, step: int | None, metric: str) -> str:
    """Return the address of a step, at the row or token where a metric is most extreme."""
    if record_page is None or step is None:
        return ""
    return record_page.address(step, *place_in(record_page.record, step, metric))


def sample_address(record_page: RecordPage | None, sample: Sample) -> str:
    return "" if record_page is None else record_page.address(sample.step, sample.prompt, sample.sample)


def alarm_lines(alarm: Mapping[str, Any]) -> list[Text]:
    """Return an alarm of the JSON report as two or three lines, as `--follow` prints them."""
    step = "" if alarm["onset"] is None else f" from step {alarm['onset']}"
    style = STYLES[LEVELS[alarm["severity"]]]
    return [
        styled(f"[bold {style}]{{}}  {{}}[/]{{}}: {{}}", alarm["id"], alarm["title"], step, alarm["found"]),
        *(styled("  {}", advice) for advice in alarm["advice"][:1]),
        *(styled("  look  {}", alarm["look"]) for _ in range(bool(alarm["look"]))),
    ]


def since(alarm: Alarm) -> str:
    """Return when a problem began and what it has cost since."""
    return f"step {alarm.onset}" + (f": {alarm.cost}" if alarm.cost else "")


def sample_line(sample: Sample) -> str:
    """Return the place of a sample, as `open --step` and `--at` take it, and its excerpt."""
    return f"--step {sample.step} --at {sample.prompt}.{sample.sample}  {sample.text}"


def override_lines(found: Examination) -> list[str]:
    """Return the recommended change as command-line overrides."""
    return [f"{name}={json.dumps(value)}" for name, value in found.overrides.items()]
