"""`areal-debug hang --slow`: print who is slow, and the time budget of each rank."""

import json
import shutil

import click
from rich.table import Table
from rich.text import Text

from areal_core.safety.printable import printable
from areal_debug.render import announce, console
from hangdoctor.collect.discover import Search
from hangdoctor.slow.blame import SlowVerdict
from hangdoctor.slow.phases import PHASE_NAMES
from hangdoctor.slow.sample import SECONDS, who_is_slow

STYLES = {0: "bold green", 1: "bold red", 2: "bold"}
LEAST_SHOWN = 0.02


def show_slow(pids: tuple[int, ...], seconds: float | None, as_json: bool) -> int:
    """Sample the job and print the verdict; return 0 if no rank is slow, 1 if one is, else 2.

    Raises:
        HangInputError: no py-spy, no rank, or more than one job.
    """
    announce(f"sampling the stacks of all ranks for {seconds or SECONDS:g} s")
    verdict = who_is_slow(Search(pids), seconds or SECONDS)
    if as_json:
        click.echo(json.dumps(verdict.as_json(), indent=2))
        return exit_status(verdict)
    out = console(width=shutil.get_terminal_size((120, 40)).columns)
    out.print(heading(verdict))
    if verdict.ranks:
        out.print(table_of(verdict))
    out.print(reasons(verdict))
    return exit_status(verdict)


def exit_status(verdict: SlowVerdict) -> int:
    """Return 0 if nothing is slow, 1 if a rank, an engine or a phase is, 2 where it is unknown."""
    return {"no_rank_is_slow": 0, "inconclusive": 2}.get(verdict.label, 1)


def heading(verdict: SlowVerdict) -> Text:
    """Return the verdict as styled text."""
    text = Text()
    text.append(verdict.label, STYLES[exit_status(verdict)])
    text.append(f"  {verdict.confidence} confidence\n")
    return text.append(f"{printable(verdict.summary)}\n")


def table_of(verdict: SlowVerdict) -> Table:
    """Return the time budget: a row per rank, a column per phase that takes some time."""
    shown = [
        phase for phase in PHASE_NAMES if any(b.shares.get(phase, 0.0) >= LEAST_SHOWN for b in verdict.ranks)
    ]
    table = Table(title="Share of the time, in percent", title_justify="left", box=None, pad_edge=False)
    table.add_column("rank", justify="right")
    for phase in shown:
        table.add_column(PHASE_NAMES[phase], justify="right")
    table.add_column("late", justify="right")
    for budget in verdict.ranks:
        cells = [f"{100 * budget.shares[phase]:.0f}" if phase in budget.shares else "-" for phase in shown]
        style = "bold red" if budget.rank in verdict.culprit_ranks else ""
        table.add_row(str(budget.rank), *cells, f"{100 * budget.late:.0f}", style=style)
    return table


def reasons(verdict: SlowVerdict) -> Text:
    """Return evidence and what would settle it, then how much was seen."""
    text = Text()
    steps = [f"{step.do}   # {step.why}" for step in verdict.next_steps]
    for title, lines in (("Evidence", verdict.evidence), ("Would settle it", steps)):
        if lines:
            text.append(f"\n{title}\n", "bold")
            for line in lines:
                text.append(f"  {printable(line)}\n")
    seen = f"\n{verdict.num_rounds} rounds of stacks in {verdict.seconds:.0f} s."
    late = " late: of the moments in which most ranks wait, those in which this one does not."
    text.append(seen + (late if verdict.ranks else ""), "dim")
    return text
