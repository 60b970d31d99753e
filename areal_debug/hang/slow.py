"""`areal-debug hang --slow`: print who is slow, and the time budget of each rank."""

import json
import shutil

import click

from areal_debug.render import announce, console
from areal_debug.report.model import Block, Cell, Facts, Level, Report, Row, Table
from areal_debug.report.terminal import print_report
from hangdoctor.collect.discover import Search
from hangdoctor.slow.blame import SlowVerdict
from hangdoctor.slow.live import who_is_slow
from hangdoctor.slow.phases import PHASE_NAMES
from hangdoctor.slow.sample import SECONDS

LEVELS: dict[str, Level] = {"no_rank_is_slow": "good", "inconclusive": "unsure"}  # else bad
LEAST_SHOWN = 0.02


def show_slow(search: Search, seconds: float | None, as_json: bool) -> int:
    """Sample the job and print the verdict; return 0 if no rank is slow, 1 if one is, else 2.

    Raises:
        HangInputError: no py-spy, no rank, or more than one job.
    """
    announce(f"sampling the stacks of all ranks for {seconds or SECONDS:g} s")
    verdict = who_is_slow(search, seconds or SECONDS)
    report = report_of(verdict)
    if as_json:
        click.echo(json.dumps(verdict.as_json(), indent=2))
    else:
        print_report(console(width=shutil.get_terminal_size((120, 40)).columns), report)
    return report.exit_code


def report_of(verdict: SlowVerdict) -> Report:
    """Return who is slow, the time budget of each rank, evidence and what would settle it."""
    shown = [
        phase for phase in PHASE_NAMES if any(b.shares.get(phase, 0.0) >= LEAST_SHOWN for b in verdict.ranks)
    ]
    rows = []
    for budget in verdict.ranks:
        cells = [f"{100 * budget.shares[phase]:.0f}" if phase in budget.shares else "-" for phase in shown]
        level: Level = "bad" if budget.rank in verdict.culprit_ranks else ""
        rows.append([Cell(cell, level) for cell in (str(budget.rank), *cells, f"{100 * budget.late:.0f}")])
    headings = [f"{name}>" for name in ("rank", *(PHASE_NAMES[phase] for phase in shown), "late")]
    blocks: list[Block] = [Table(headings, rows, "Share of the time, in percent")] if rows else []
    if verdict.evidence:
        blocks.append(Facts([Row("", text) for text in verdict.evidence], "Evidence"))
    if steps := [Row(step.do, step.why, is_code=True) for step in verdict.next_steps]:
        blocks.append(Facts(steps, "Would settle it"))
    late = " late: of the moments in which most ranks wait, those in which this one does not."
    blocks.append(f"{verdict.num_rounds} rounds of stacks in {verdict.seconds:.0f} s.{late if rows else ''}")
    sentence = f"{verdict.summary} ({verdict.confidence} confidence)"
    return Report(verdict.label, sentence, LEVELS.get(verdict.label, "bad"), blocks)
