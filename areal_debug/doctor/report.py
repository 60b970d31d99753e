"""What the doctor says of a run, for a terminal and for a page."""

import json
import re
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from areal_debug.doctor.alarm import Alarm
from areal_debug.doctor.checks import Checks, unread
from areal_debug.doctor.examine import Examination, is_one_step, look_at, place_in
from areal_debug.doctor.names import QUANTITIES
from areal_debug.doctor.read import Run
from areal_debug.doctor.rules.rewards import TERM
from areal_debug.doctor.series import FEWEST_STEPS
from areal_debug.render import count, format_number, styled
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
        options = " ".join(f"{name}={json.dumps(value)}" for name, value in found.overrides.items())
        blocks.append(Facts([Row("", options, is_code=True)], "Try first"))
    blocks.append(Facts([], "Metrics checked"))
    blocks += [
        Curve(
            quantity.replace("_", " "),
            series.finite.values.tolist(),
            series.finite.steps.tolist(),
            caption=f"{quantity.replace('_', ' ')}: {series.name}. {QUANTITIES[quantity]['meaning']}",
            ends=f"first {format_number(series.finite.values[0])}, last {format_number(series.values[-1])}",
        )
        for quantity, series in run.series.items()
        if len(series.finite.values)
    ]
    if found.checks.unobserved:
        blocks.append(unobserved_of(run, found.checks))
    blocks += [
        f"not read: {name}; to judge it: --metric {quantity}={name}" for name, quantity in unread(run).items()
    ]
    blocks += filter(None, [unknown_names_of(run)])
    return Report(verdict, sentence, level, blocks, run.notes)


def verdict_of(run: Run, found: Examination) -> tuple[str, str, Level]:
    logged_by = f" (metric names of {run.family})" if run.family != "unknown" else ""
    first, last = run.span if run.by_name else (0, 0)
    between = f" ({first} to {last})" if last - first >= run.num_steps else ""
    what = f"{count(run.num_steps, run.unit)}{between} of {run.source}{logged_by}"
    if not run.series:
        return "Inconclusive", f"none of the metrics in {what} is known", "unsure"
    if found.alarms:
        worst, num_more = found.alarms[0], len(found.alarms) - 1
        title = worst.title + (f", and {num_more} more" if num_more else "")
        if is_one_step(run, found):
            alone = f"{title}, in the only step of {run.source}; one step shows no trend: give more"
            return "Inconclusive", alone, "unsure"
        return title[:1].upper() + title[1:], what, LEVELS[worst.severity]
    if run.num_steps < FEWEST_STEPS:
        return "Inconclusive", f"{what}, and a trend needs at least {FEWEST_STEPS}", "unsure"
    tried, left = count(found.checks.num_tried, "check"), found.checks.num_all - found.checks.num_tried
    if (late := found.checks.lacks("whole")) in run.series:
        seen = run.finite(late)
        why = (
            f"the {late} stays between {seen.values.min():.3g} and {seen.values.max():.3g}, and may have "
            f"changed before step {seen.steps[0]}: give the steps before it as well"
        )
    elif (short := found.checks.lacks("20")) in run.series:
        num = len(run.finite(short).values)
        why = f"{tried} found no problem, but {num} values of the {short} show no trend: it takes 20"
    elif found.checks.are_few:
        why = f"{tried} found no problem; {left} others could not run, since they need other columns (listed below)"
    elif run.damage.found:
        return "Damaged", f"no problem found in the intact steps: {what}", "bad"
    else:
        return "Healthy", f"{tried} found no problem in {what}", "good"
    return "Inconclusive", f"{why}: {what}", "unsure"


def unobserved_of(run: Run, checks: Checks) -> str:
    """Return one sentence on the checks that had no data, and what they need beside steps."""
    tried = (
        f"{checks.num_tried} of {checks.num_all} checks had data, and {len(checks.failed)} found a problem"
    )
    if run.num_steps < FEWEST_STEPS or not run.series:
        return f"{tried}; most others need {FEWEST_STEPS} steps (--json has the list)"
    by_need: dict[str, list[str]] = {}
    for id, needs in checks.unobserved.items():
        by_need.setdefault(" and ".join(need.replace("|", " or ") for need in needs), []).append(id)
    lacking = "; ".join(f"{need.replace('_', ' ')} ({', '.join(ids)})" for need, ids in by_need.items())
    lacking = lacking.replace("whole ", "the first steps of the ").replace("exact ", "unrounded ")
    lacking = re.sub(r"\b([24]0) ", r"\1 values of the ", lacking)
    return f"{tried}; the others need: {lacking}"


def unknown_names_of(run: Run) -> str:
    """Return one sentence on the metrics that no rule reads, and how to name one of them."""
    unknown = [name for name in run.unknown_names if name not in unread(run) and not TERM.match(name)]
    names = ", ".join(unknown[:NAMES_SHOWN])
    more = len(unknown) - NAMES_SHOWN
    rest = f" and {more} more (--json lists all)" if more > 0 else ""
    also = f"Also logged, but not judged by any check: {names}{rest}; to judge one: --metric QUANTITY=NAME"
    return also if names else ""


def finding_of(run: Run, alarm: Alarm, record_page: RecordPage | None) -> Finding:
    """Return an alarm with its curve, its evidence and what to do."""
    evidence = [f"{run.unit} {step}: {format_number(value)}" for step, value in alarm.evidence]
    address = ""  # of the first step, at the row or token where the metric is most extreme
    if record_page is not None and alarm.evidence:
        step = alarm.evidence[0][0]
        address = record_page.address(step, *place_in(record_page.record, step, alarm.metric))
    look, shows_since = look_at(run, alarm), alarm.onset is not None and run.num_steps > 1
    rows = [
        Row("found", alarm.found),
        Row("evidence", ", ".join(evidence), address=address),
        *rows_of("since", [f"{run.unit} {alarm.onset} ({alarm.cost})".removesuffix(" ()")] * shows_since),
        *([Row("look", look, is_code=True)] if look else []),
        *(
            Row(
                "" if i else "samples",
                f"--step {one.step} --at {one.prompt}.{one.sample}  {one.text}",  # as `open` takes it
                address="" if record_page is None else record_page.address(one.step, one.prompt, one.sample),
            )
            for i, one in enumerate(alarm.samples)
        ),
        *rows_of("advice", [f"{i}. {advice}" for i, advice in enumerate(alarm.advice, start=1)]),
        Row("to confirm", alarm.experiment),
        Row("source", alarm.source),
    ]
    kept, marked = run.by_name[alarm.metric].finite, frozenset(step for step, _ in alarm.evidence)
    curve = Curve(kept.name, kept.values.tolist(), kept.steps.tolist(), marked)
    return Finding(alarm.id, alarm.title, LEVELS[alarm.severity], rows, curve=curve)


def alarm_lines(alarm: Mapping[str, Any]) -> list[Text]:
    """Return an alarm of the JSON report as two or three lines, as `--follow` prints them."""
    step = "" if alarm["onset"] is None else f" from step {alarm['onset']}"
    style = STYLES[LEVELS[alarm["severity"]]]
    return [
        styled(f"[bold {style}]{{}}  {{}}[/]{{}}: {{}}", alarm["id"], alarm["title"], step, alarm["found"]),
        *(styled("  {}", advice) for advice in alarm["advice"][:1]),
        *(styled("  look  {}", alarm["look"]) for _ in range(bool(alarm["look"]))),
    ]
