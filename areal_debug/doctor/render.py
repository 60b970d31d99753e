"""Print the doctor's findings: alarms with a curve each, then every metric that was checked."""

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from areal_debug.doctor.alarm import Alarm, Sample
from areal_debug.doctor.examine import Examination, look_at
from areal_debug.doctor.read import Run
from areal_debug.doctor.series import FEWEST_STEPS
from areal_debug.render import format_number, sparkline, styled

NAMES_SHOWN = 20
STYLES = {"error": "red", "warning": "yellow"}


def print_examination(out: Console, run: Run, found: Examination) -> None:
    """Print the complete report."""
    out.print(verdict_of(run, found))
    for note in run.notes:
        out.print(styled("[dim]{}[/dim]", note))
    out.print()
    for alarm in found.alarms:
        print_alarm(out, run, alarm)
    print_curves(out, run)
    if found.overrides:
        out.print("Try first:")
        out.print(styled("  {}", " ".join(override_lines(found))))
    if found.absent:
        out.print(
            styled(
                "[dim]not logged, so not checked: {}[/dim]",
                ", ".join(name.replace("_", " ") for name in found.absent),
            )
        )
    if run.unknown_names:
        out.print(styled("[dim]{}[/dim]", unknown_names_of(run)))


def unknown_names_of(run: Run) -> str:
    """Return one sentence on the metrics that no rule reads, and how to name one of them."""
    names = ", ".join(run.unknown_names[:NAMES_SHOWN])
    more = len(run.unknown_names) - NAMES_SHOWN
    rest = f" and {more} more (--json lists all)" if more > 0 else ""
    return f"logged, but no known quantity: {names}{rest}; to judge one: --metric QUANTITY=NAME"


def verdict_of(run: Run, found: Examination) -> Text:
    what = f"{run.num_steps} steps of {run.source} (names of {run.family})"
    if not run.series:
        return styled("[yellow]Inconclusive:[/yellow] none of the metrics in {} is known", what)
    if not found.alarms and run.num_steps < FEWEST_STEPS:
        return styled("[yellow]Inconclusive:[/yellow] {}, and a trend needs at least {}", what, FEWEST_STEPS)
    if not found.alarms:
        return styled("[bold green]Healthy:[/] no problem found in {}", what)
    first = found.alarms[0]
    more = f", and {len(found.alarms) - 1} more" if len(found.alarms) > 1 else ""
    return styled(
        f"[bold {STYLES[first.severity]}]{{}}[/]{{}}: {{}}",
        first.title[:1].upper() + first.title[1:],
        more,
        what,
    )


def print_alarm(out: Console, run: Run, alarm: Alarm) -> None:
    out.print(styled(f"[bold {STYLES[alarm.severity]}]{{}}  {{}}[/]", alarm.id, alarm.title))
    out.print(
        styled(
            "  {:<11} {}  [dim]{}[/dim]",
            "curve",
            sparkline(run.by_name[alarm.metric].finite.values.tolist()),
            alarm.metric,
        )
    )
    rows = [
        ("found", alarm.found),
        ("evidence", ", ".join(f"step {step}: {format_number(value)}" for step, value in alarm.evidence)),
        *([("since", since(alarm))] if alarm.onset is not None else []),
        *([("look", command)] if (command := look_at(run, alarm)) else []),
        *((("" if i else "samples"), sample_line(sample)) for i, sample in enumerate(alarm.samples)),
        *((("" if i > 1 else "advice"), f"{i}. {advice}") for i, advice in enumerate(alarm.advice, start=1)),
        ("to confirm", alarm.experiment),
        ("source", alarm.source),
    ]
    for heading, text in rows:
        out.print(styled("  {:<11} {}", heading, text))
    out.print()


def alarm_lines(alarm: Mapping[str, Any]) -> list[Text]:
    """Return an alarm of the JSON report as two or three lines, as `--follow` prints them."""
    step = "" if alarm["onset"] is None else f" from step {alarm['onset']}"
    style = STYLES[alarm["severity"]]
    return [
        styled(f"[bold {style}]{{}}  {{}}[/]{{}}: {{}}", alarm["id"], alarm["title"], step, alarm["found"]),
        *(styled("  {}", advice) for advice in alarm["advice"][:1]),
        *(styled("  look  {}", alarm["look"]) for _ in range(bool(alarm["look"]))),
    ]


def since(alarm: Alarm) -> str:
    """Return when a problem began and what it has cost since."""
    return f"step {alarm.onset}" + (f": {alarm.cost}" if alarm.cost else "")


def sample_line(sample: Sample) -> str:
    """Return the place of a sample, as `view --step` and `--at` take it, and its excerpt."""
    return f"--step {sample.step} --at {sample.prompt}.{sample.sample}  {sample.text}"


def print_curves(out: Console, run: Run) -> None:
    """Print every metric that was checked."""
    for quantity, series in run.series.items():
        values = series.finite.values.tolist()
        if values:
            ends = f"{format_number(values[0])} to {format_number(values[-1])}"
            out.print(styled("{:<22}{}  [dim]{}[/dim]", quantity.replace("_", " "), sparkline(values), ends))
    out.print()


def override_lines(found: Examination) -> list[str]:
    return [f"{name}={json.dumps(value)}" for name, value in found.overrides.items()]
