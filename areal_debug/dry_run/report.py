"""What `areal-debug train --dry-run` says: processes, steps, and memory."""

from collections.abc import Sequence

from areal_core.engine.memory_plan import Part
from areal_debug.dry_run.plan import DryRun, Processes, Steps
from areal_debug.render import count, format_bytes
from areal_debug.report.model import Block, Facts, Report, Row, rows_of


def report_of(run: DryRun) -> Report:
    """Return the report of a run that would start.

    The items of a server are not summed: its cache is as large as its device allows, and requests
    that do not fit wait.
    """
    memory = run.memory
    blocks: list[Block] = [Facts([Row(processes_of(p), p.where) for p in run.processes], "Processes")]
    if run.steps is not None:
        blocks.append(Facts([*rows_of_length(run.steps), Row("a step", run.update)], "Length"))
    if memory.rank:
        total = format_bytes(sum(part.size_bytes for part in memory.rank))
        blocks.append(Facts([*memory_rows(memory.rank), Row("total", f"{total:>9}")], "Memory of a rank"))
    if memory.host:
        title = "Host memory of a rank, used instead of device memory"
        blocks.append(Facts(memory_rows(memory.host), title))
    if memory.server:
        blocks.append(Facts(memory_rows(memory.server), "Memory of a server's device"))
    blocks += [f"memory not estimated: {reason}" for reason in memory.unknown]
    blocks.append(f"logs: {run.logs}")
    if run.notes:
        blocks.append(Facts(rows_of("note", run.notes, "unsure"), "No effect, or worth checking"))
    sentence = f"{run.script} with {run.config_file}; nothing was started."
    note = f"{run.method} of {run.model} on {run.allocation}; options agree with each other"
    if run.unchecked:
        note += f"; not checked: {', '.join(run.unchecked)}"
    return Report("Would run", sentence, "good", blocks, [note])


def memory_rows(parts: Sequence[Part]) -> list[Row]:
    return [Row(part.name, f"{format_bytes(part.size_bytes):>9}  {part.how}") for part in parts]


def processes_of(item: Processes) -> str:
    noun, _, rest = item.what.partition(" with ")
    named = count(item.count, noun) + f" with {rest}" * bool(rest)
    return f"{named} of {item.devices_each} devices" if item.devices_each > 1 else named


def rows_of_length(steps: Steps) -> list[Row]:
    """Return the rows of the dataset and the steps of the run."""
    if steps.num_rows is None:
        limit = [Row("steps", f"at most {steps.total:,}")] if steps.total is not None else []
        return [Row("rows", f"not counted: {steps.rows}"), *limit]
    length = f"{steps.total:,} in total, {steps.per_epoch:,} per epoch"
    return [Row("rows", f"{steps.num_rows:,} ({steps.rows})"), Row("steps", length)]
