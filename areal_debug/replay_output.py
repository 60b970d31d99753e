"""Print a replay: what was set differently, its guarantee, one line per step, a verdict."""

from rich.console import Console

from areal_debug.render import difference_table, escaped, format_number, format_value
from replayer.check import GRAD_NORM, LOSS, RankDifference, ReplayReport, StepResult

SHOWN_OF_A_KIND = 2
EXPECTED = {
    "bitwise": "bit-identical numbers",
    "noise": "numbers within a few times this machine's noise floor",
    "statistical": "agreement over many steps, not of single steps",
    "changed": "different numbers, because something was set differently",
    "unrecorded": "nothing to compare with",
}


def print_start(out: Console, report: ReplayReport) -> None:
    """Print what was set differently and which guarantee follows, before the first number."""
    header = report.set_differently
    assert header is not None
    for title, differences in (
        ("Set differently in the config", header.config),
        ("Different environment", header.environment),
        ("Different model files", header.model),
    ):
        if differences:
            out.print(difference_table(title, differences))
            out.print()
    if report.guarantee.kind != "bitwise":
        out.print(f"[bold]Expect[/bold] {EXPECTED[report.guarantee.kind]}:")
        for reason in report.guarantee.reasons:
            out.print(f"  {escaped(reason)}")
        out.print()


def print_step(out: Console, result: StepResult, in_detail: bool = True) -> None:
    """Print one line, and below it the first differences of each kind if `in_detail`."""
    numbers = f"loss {format_number(result.loss):<12} grad_norm {format_number(result.grad_norm):<9}"
    if result.identical:
        out.print(
            f"step {result.step:>4}  [green]identical[/green]  {numbers}  "
            f"[dim]{result.num_parameters} parameter checksums, {result.num_compared} values in total[/dim]"
        )
        return
    if not result.num_compared:
        out.print(f"step {result.step:>4}  {numbers}  [dim]not recorded[/dim]")
        return
    if not in_detail:
        recorded = [format_number(result.recorded[name]) for name in (LOSS, GRAD_NORM)]
        out.print(f"step {result.step:>4}  {numbers}  [dim]recorded {recorded[0]} and {recorded[1]}[/dim]")
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
    """Return one value, recorded and replayed."""
    recorded, replayed = format_value(difference.recorded), format_value(difference.replayed)
    rank = f" (rank {difference.rank})" if difference.kind == "loss" else ""
    return escaped(f"{difference.kind} {difference.where}{rank}: recorded {recorded}, replayed {replayed}")


def print_verdict(out: Console, report: ReplayReport) -> None:
    """Print whether the replay met its guarantee, and where it diverged first."""
    first, count = report.first_different, len(report.steps)
    if report.guarantee.kind == "unrecorded":
        out.print(
            f"[bold yellow]Nothing to compare:[/bold yellow] {count} steps were trained on recorded rollouts."
        )
        out.print("`--output FOLDER` records what comes out, and that record replays bit by bit.")
        return
    if first is None:
        out.print(
            f"[bold green]Bit-identical:[/bold green] {count} of {count} steps: every loss, gradient norm, statistic and "
            f"parameter checksum has the recorded bits."
        )
        return
    num_different = sum(not result.identical for result in report.steps)
    kinds = sorted({difference.kind for difference in first.differences})
    where = f"{num_different} of {count} steps; the first is step {first.step} ({', '.join(kinds)})."
    verdict = report.verdict
    if verdict is None:
        out.print(f"[bold yellow]Inconclusive:[/bold yellow] bits differ in {where}")
        out.print(
            "A difference is allowed here, see above. `areal-debug replay` measures this machine's noise floor and compares."
        )
    elif report.guarantee.kind in ("noise", "statistical"):
        print_distance(out, report, where)
    else:
        out.print(f"[bold red]Different:[/bold red] {where}")
        out.print(reason_of(report))


def print_distance(out: Console, report: ReplayReport, where: str) -> None:
    """Print a verdict in units of the noise floor or of standard errors."""
    verdict = report.verdict
    assert verdict is not None
    unit = "the noise floor" if report.guarantee.kind == "noise" else "the standard error over steps"
    word = {
        "within": f"[bold green]Within {unit}:[/bold green]",
        "unclear": "[bold yellow]Inconclusive:[/bold yellow]",
        "different": "[bold red]Different:[/bold red]",
    }[verdict.finding]
    out.print(f"{word} bits differ in {where}")
    if verdict.k is None:
        out.print("Too few values could be compared: replay more steps.")
        return
    at = f" in step {verdict.step}" if verdict.step is not None else ""
    out.print(f"The largest difference is {verdict.k:.3g} x {unit}: {verdict.where}{at}.")
    if verdict.finding == "within":
        out.print(
            f"A defect smaller than that cannot be excluded; the guarantee is {report.guarantee.kind}, not bitwise."
        )
    elif verdict.finding == "unclear":
        out.print(
            "This is above the noise floor and below what a defect usually causes: replay on the recorded machine."
        )


def reason_of(report: ReplayReport) -> str:
    """Return where to search for the cause of different numbers."""
    header = report.set_differently
    if report.guarantee.kind == "changed" or (header is not None and not header.identical):
        return "The cause is what was set differently, see above."
    return "Nothing was set differently: check the code, the hardware, and for kernels that are not deterministic."
