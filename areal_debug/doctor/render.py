"""Print the doctor's findings: alarms with a curve each, then every metric that was checked."""

import json

from rich.console import Console

from areal_debug.doctor.alarm import Alarm
from areal_debug.doctor.examine import Examination
from areal_debug.doctor.read import Run
from areal_debug.doctor.series import FEWEST_STEPS
from areal_debug.render import escaped, format_number, sparkline

STYLES = {"error": "red", "warning": "yellow"}


def print_examination(out: Console, run: Run, found: Examination) -> None:
    """Print the complete report."""
    out.print(verdict_of(run, found))
    if run.choice:
        out.print(f"[yellow]{escaped(run.choice)}[/yellow]")
    out.print()
    for alarm in found.alarms:
        print_alarm(out, run, alarm)
    print_curves(out, run)
    if found.overrides:
        out.print("Try first:")
        out.print("  " + escaped(" ".join(override_lines(found))))
    if found.absent:
        out.print(
            f"[dim]not logged, so not checked: {', '.join(name.replace('_', ' ') for name in found.absent)}[/dim]"
        )


def verdict_of(run: Run, found: Examination) -> str:
    """Return the verdict in one line."""
    what = f"{run.num_steps} steps of {escaped(run.source)} (names of {run.family})"
    if not run.series:
        return f"[yellow]Inconclusive:[/yellow] none of the metrics in {what} is known"
    if not found.alarms and run.num_steps < FEWEST_STEPS:
        return f"[yellow]Inconclusive:[/yellow] {what}, and a trend needs at least {FEWEST_STEPS}"
    if not found.alarms:
        return f"[bold green]Healthy:[/] no problem found in {what}"
    first = found.alarms[0]
    more = f", and {len(found.alarms) - 1} more" if len(found.alarms) > 1 else ""
    return f"[bold {STYLES[first.severity]}]{escaped(first.title[:1].upper() + first.title[1:])}[/]{more}: {what}"


def print_alarm(out: Console, run: Run, alarm: Alarm) -> None:
    """Print an alarm with its curve and its evidence."""
    out.print(f"[bold {STYLES[alarm.severity]}]{alarm.id}  {escaped(alarm.title)}[/]")
    out.print(
        f"  {'curve':<11} {sparkline(run.by_name[alarm.metric].finite.values.tolist())}  [dim]{escaped(alarm.metric)}[/dim]"
    )
    rows = [
        ("found", alarm.found),
        ("evidence", ", ".join(f"step {step}: {format_number(value)}" for step, value in alarm.evidence)),
        *((("" if i > 1 else "advice"), f"{i}. {advice}") for i, advice in enumerate(alarm.advice, start=1)),
        ("to confirm", alarm.experiment),
        ("source", alarm.source),
    ]
    for heading, text in rows:
        out.print(f"  {heading:<11} {escaped(text)}")
    out.print()


def print_curves(out: Console, run: Run) -> None:
    """Print every metric that was checked."""
    for quantity, series in run.series.items():
        values = series.finite.values.tolist()
        if values:
            ends = f"{format_number(values[0])} to {format_number(values[-1])}"
            out.print(f"{quantity.replace('_', ' '):<22}{sparkline(values)}  [dim]{ends}[/dim]")
    out.print()


def override_lines(found: Examination) -> list[str]:
    """Return the recommended change as command-line overrides."""
    return [f"{name}={json.dumps(value)}" for name, value in found.overrides.items()]
