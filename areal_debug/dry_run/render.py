"""Print the report of `areal-debug train --dry-run`."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from areal_debug.dry_run.memory import Part
from areal_debug.dry_run.plan import DryRun, Processes, Steps
from areal_debug.render import format_bytes, styled


def print_dry_run(out: Console, run: DryRun) -> None:
    """Print the verdict, then processes, steps, memory, and the stages of a step."""
    out.print(
        styled(
            "[bold green]Would run:[/bold green] {} with {}; nothing was started.",
            run.script,
            run.config_file,
        )
    )
    out.print(styled("{} of {} on {}; options are consistent", run.method, run.model, run.allocation))
    out.print()
    out.print(table("Processes", [(describe_count(item), item.where) for item in run.processes]))
    if run.steps is not None:
        out.print(table("Length", describe_steps(run.steps)))
    print_memory(out, run)
    if run.step:
        out.print(table("A step", [(stage.name, stage.does) for stage in run.step]))
        out.print(table("Between steps", [(stage.name, stage.does) for stage in run.upkeep]))
    out.print(styled("logs: {}", run.logs))
    if run.notes:
        out.print()
        out.print(styled("[yellow]No effect, or worth checking:[/yellow]"))
        for note in run.notes:
            out.print(styled("  {}", note))


def print_memory(out: Console, run: DryRun) -> None:
    """Print the items and the sum of a rank's; reasons for what is unknown.

    The items of a server are not summed: its cache is as large as its device allows, and requests
    that do not fit wait.
    """
    memory = run.memory
    if memory.rank:
        total = format_bytes(sum(part.size_bytes for part in memory.rank))
        out.print(table("Memory of a rank", [*memory_rows(memory.rank), ("total", f"{total:>9}")]))
    if memory.host:
        out.print(table("Host memory of a rank, used instead of device memory", memory_rows(memory.host)))
    if memory.server:
        out.print(table("Memory of a server's device", memory_rows(memory.server)))
    for reason in memory.unknown:
        out.print(styled("memory not estimated: {}", reason))


def memory_rows(parts: Sequence[Part]) -> list[tuple[str, str]]:
    return [(part.name, f"{format_bytes(part.size_bytes):>9}  {part.how}") for part in parts]


def describe_count(item: Processes) -> str:
    noun, _, rest = item.what.partition(" with ")
    plural = f"{item.count} {noun}{'s' * (item.count != 1)}{f' with {rest}' * bool(rest)}"
    return f"{plural} of {item.devices_each} devices" if item.devices_each > 1 else plural


def describe_steps(steps: Steps) -> list[tuple[str, str]]:
    """Return the rows of the dataset and the steps of the run."""
    if steps.num_rows is None:
        limit = [("steps", f"at most {steps.total:,}")] if steps.total is not None else []
        return [("rows", f"not counted: {steps.rows}"), *limit]
    return [
        ("rows", f"{steps.num_rows:,} ({steps.rows})"),
        ("steps", f"{steps.total:,} in total, {steps.per_epoch:,} per epoch"),
    ]


def table(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    """Make a table of two columns under a title."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
    made.add_column(min_width=20)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(styled("{}", name), styled("{}", value))
    return made
