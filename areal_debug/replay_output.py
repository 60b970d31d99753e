"""What a replay says on rank 0: what was set differently, one line a step, and a verdict."""

import os
from collections.abc import Callable
from typing import Any

from rich.console import Console

from areal_debug.render import console, difference_table, escaped, format_number, format_value
from areal_debug.report_file import QUIET, write_report
from replayer.check import RankDifference, ReplayCheck, ReplayReport, StepResult
from replayer.compare import HeaderComparison

SHOWN_OF_A_KIND = 2


def print_and_report(check: ReplayCheck) -> Callable[..., None]:
    """The check as an observer that also prints as it goes and leaves its report behind at the end."""
    out = Console(quiet=True) if os.environ.get(QUIET) else console()
    check.on_header = lambda header: print_header(out, header)
    check.on_step = lambda result: print_step(out, result)

    def observe(event: str, **facts: Any) -> None:
        check(event, **facts)
        if event == "end" and facts["error"] is None:
            print_verdict(out, check.report)
            write_report(check.report.to_dict())

    return observe


def print_header(out: Console, header: HeaderComparison) -> None:
    """What was set differently, before any number that follows from it."""
    for title, differences in (
        ("Set differently in the config", header.config),
        ("Different environment", header.environment),
        ("Different model files", header.model),
    ):
        if differences:
            out.print(difference_table(title, differences))
            out.print()


def print_step(out: Console, result: StepResult) -> None:
    """One line, and the first differences of each kind below it."""
    numbers = f"loss {format_number(result.loss):<12} grad_norm {format_number(result.grad_norm):<9}"
    if result.identical:
        out.print(
            f"step {result.step:>4}  [green]identical[/green]  {numbers}  "
            f"[dim]{result.num_parameters} parameter checksums, {result.num_compared} values in all[/dim]"
        )
        return
    out.print(f"step {result.step:>4}  [red]differs in {len(result.differences)} values[/red]  {numbers}")
    by_kind = {
        kind: [d for d in result.differences if d.kind == kind] for kind in ("loss", "stat", "parameter")
    }
    shown = [difference for same in by_kind.values() for difference in same[:SHOWN_OF_A_KIND]]
    for difference in shown:
        out.print(f"           {describe(difference)}")
    if len(result.differences) > len(shown):
        out.print(f"           ... and {len(result.differences) - len(shown)} more")


def describe(difference: RankDifference) -> str:
    """One value, recorded and replayed."""
    recorded, replayed = format_value(difference.recorded), format_value(difference.replayed)
    rank = f" (rank {difference.rank})" if difference.kind == "loss" else ""
    return escaped(f"{difference.kind} {difference.where}{rank}: recorded {recorded}, replayed {replayed}")


def print_verdict(out: Console, report: ReplayReport) -> None:
    """Whether the replay met the record, and where it left it."""
    first = report.first_different
    count = len(report.steps)
    if first is None:
        out.print(
            f"[bold green]Bit-identical:[/bold green] {count} of {count} steps: every loss, gradient norm, statistic and "
            f"parameter checksum has the recorded bits."
        )
        return
    num_different = sum(not result.identical for result in report.steps)
    kinds = sorted({difference.kind for difference in first.differences})
    out.print(
        f"[bold red]Different:[/bold red] {num_different} of {count} steps; the first is step {first.step} "
        f"({', '.join(kinds)})."
    )
    header = report.set_differently
    if header is not None and not header.identical:
        out.print("What was set differently stands above; the numbers follow from it.")
    else:
        out.print(
            "Nothing was set differently: look at the code, the hardware, or a kernel that is not deterministic."
        )
