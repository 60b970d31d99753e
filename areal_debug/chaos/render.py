"""Print the report of `areal-debug chaos`."""

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Console

from areal_debug.chaos.history import EXAMPLES
from areal_debug.render import styled

if TYPE_CHECKING:
    from areal_debug.chaos.chaos_training import ChaosReport
    from areal_debug.chaos.history import Violations
    from areal_debug.chaos.trial import Trial

HEADINGS = {
    "lost": "lost",
    "doubled": "doubled",
    "too_old": "too old",
    "poisoned": "poisoned",
    "ended": "ended early",
}


def print_chaos(out: Console, report: "ChaosReport") -> None:
    """Print the verdict, the counts, and examples of what is wrong."""
    counts = report.violations.counts()
    what = f"{report.rows} rows of {report.steps} steps, {report.replies} replies, {report.injected.total()} faults"
    if report.violations:
        wrong = ", ".join(f"{count} {HEADINGS[kind]}" for kind, count in counts.items() if count)
        out.print(styled("[bold red]Violated:[/bold red] {}; {}.", wrong, what))
    else:
        out.print(
            styled("[bold green]Clean:[/bold green] nothing lost, doubled, too old or poisoned; {}.", what)
        )
    out.print("  ".join(f"{HEADINGS[kind]} {count}" for kind, count in counts.items()))
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted(report.injected.items()))
    out.print(styled("faults: {}", faults or "none"))
    print_violations(out, report.violations)
    if report.rank_output:
        out.print(styled("the end of the ranks' output:\n{}", report.rank_output))
    out.print(
        styled(
            "[dim]schedule: --seed {}; record: {}; output: {}[/dim]", report.seed, report.record, report.log
        )
    )


def print_violations(out: Console, violations: "Violations") -> None:
    for kind, messages in vars(violations).items():
        for message in messages[:EXAMPLES]:
            out.print(styled("[red]{}[/red]: {}", HEADINGS[kind], message))
        if len(messages) > EXAMPLES:
            out.print(styled("  ... and {} more", len(messages) - EXAMPLES))


def print_trial(out: Console, trial: "Trial") -> None:
    """Print a schedule that violated something, with its faults and the command that repeats it."""
    if not trial.violations:
        return
    out.print(styled("[bold red]Seed {}[/bold red]; again: {}", trial.seed, trial.repeat))
    print_violations(out, trial.violations)
    for fault in trial.schedule:
        out.print(styled("[dim]  {}[/dim]", str(fault)))


def print_trials(out: Console, trials: "list[Trial]") -> None:
    """Print the verdict over all schedules."""
    num_wrong = sum(bool(trial.violations) for trial in trials)
    counts: Counter[str] = sum((Counter(trial.violations.counts()) for trial in trials), Counter())
    faults = sum((trial.injected for trial in trials), Counter[str]())
    what = f"{len(trials)} schedules, {sum(trial.num_rows for trial in trials)} rows, {faults.total()} faults"
    if num_wrong:
        wrong = ", ".join(f"{count} {HEADINGS[kind]}" for kind, count in counts.items())
        out.print(styled("[bold red]Violated[/bold red] in {} of {}: {}.", num_wrong, what, wrong))
    else:
        out.print(
            styled("[bold green]Clean:[/bold green] nothing lost, doubled, too old or poisoned; {}.", what)
        )
    out.print(styled("faults: {}", ", ".join((f"{kind} {count}" for kind, count in sorted(faults.items())))))
