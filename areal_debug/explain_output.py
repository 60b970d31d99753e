"""Print `replay --explain`: the samples of a step by their share of its gradient."""

from typing import Any

from rich.console import Console
from rich.table import Table

from areal_debug.render import escaped, format_number
from recorder import Record

SHOWN = 10
COLUMNS = ("rank", "row", "prompt", "sample", "minibatch", "reward", "advantage", "tokens")


def print_explanation(out: Console, record: Record, found: dict[str, Any]) -> None:
    """Print the verdict, a table, and the text of the sample with the largest gradient."""
    samples, step = found["samples"], found["step"]
    first = samples[0]
    norms = ", ".join(format_number(norm) for norm in found["grad_norms"])
    out.print(
        f"[bold]Step {step}[/bold]: {len(samples)} samples, gradient norm {norms} (by minibatch). The largest gradient is that of "
        f"[bold]rank {first['rank']}, row {first['row']}[/bold] (prompt {first['prompt_id']}, sample {first['sample_id']}): "
        f"{100 * first['gradient_share']:.3g} % of the minibatch's gradient, {100 * first['loss_share']:.3g} % of its loss."
    )
    if not found["faithful"]:
        out.print(
            "[yellow]The replay up to this step differs from the record: shares are those of the replay.[/yellow]"
        )
    out.print(table(samples[:SHOWN]))
    if len(samples) > SHOWN:
        out.print(f"... and {len(samples) - SHOWN} with smaller gradients; --json has all of them")
    print_text(out, record, step, first)
    out.print(
        f"[dim]Shares of a minibatch's gradient sum to 100 %; a negative share opposes it. "
        f"Next: areal-debug record show {escaped(str(record.path))} --step {step}[/dim]"
    )


def table(samples: list[dict[str, Any]]) -> Table:
    """Make a table with one row per sample."""
    found = Table(box=None, pad_edge=False, header_style="dim")
    for heading in (*COLUMNS, "loss", "of loss", "of gradient", "own norm"):
        found.add_column(heading, justify="right")
    for s in samples:
        names = (s["rank"], s["row"], s["prompt_id"], s["sample_id"], s["minibatch"])
        numbers = (s["reward"], s["advantage"], s["num_trained_tokens"], s["loss"])
        found.add_row(
            *(str(name) for name in names),
            *(format_number(number) for number in numbers),
            f"{100 * s['loss_share']:.3g} %",
            f"{100 * s['gradient_share']:.3g} %",
            f"{s['gradient_norm']:.3g} x",
        )
    return found


def print_text(out: Console, record: Record, step: int, sample: dict[str, Any]) -> None:
    """Print prompt and completion, if the record contains text."""
    text = record.step(step).text(sample["rank"])
    if text is None:
        return
    line = next(line for line in text if line["row"] == sample["row"])
    out.print()
    for name in ("prompt", "completion"):
        out.print(f"[bold]{name}[/bold]  {escaped(repr(line[name]))}")
    out.print()
