"""`areal-debug consistency`: the engine's logprobs against the model's, token by token, and why they differ."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from areal_debug.render import console, errors_as_sentences, fail, print_json

if TYPE_CHECKING:
    from consistency.check import Checked, Request
    from recorder import Record


@click.command()
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--model",
    help="The weights that should have sampled the steps; those that the run started from unless given.",
)
@click.option(
    "--step",
    "steps",
    type=int,
    multiple=True,
    help="A step to check; the first one unless given. May be repeated.",
)
@click.option("--previous", help="The checkpoint before that, to recognise stale weights.")
@click.option("--base", help="The model without its adapter, to recognise an adapter that was not loaded.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), help="Of the scoring; the trainer's unless given."
)
@click.option("--temperature", type=float, help="Of the trainer's logprobs; the recorded one unless given.")
@click.option("--device", default="cpu", show_default=True, help="Where to score.")
@click.option(
    "--scores",
    "scores_folder",
    type=click.Path(path_type=Path),
    help="Keep finished scores here, and go on from them.",
)
@click.option(
    "--gate",
    default="",
    metavar="METRIC=LIMIT,...",
    help="Exit 1 when a metric is beyond its limit: mean_abs=0.02,k3=0.002.",
)
@click.option("--json", "as_json", is_flag=True, help="The same facts as JSON.")
@errors_as_sentences
def command(
    record: Path,
    model: str | None,
    steps: tuple[int, ...],
    previous: str | None,
    base: str | None,
    dtype: str | None,
    temperature: float | None,
    device: str,
    scores_folder: Path | None,
    gate: str,
    as_json: bool,
) -> None:
    """Score the sampled tokens of RECORD with a model and judge the engine's logprobs.

    Exit 0 is healthy, 1 a mismatch or a gate that does not hold, 2 cannot tell.
    """
    from areal_debug.consistency_output import print_report
    from consistency.check import Request
    from consistency.report import check_gates, document, exit_code
    from recorder import open_record

    opened = open_record(record)
    if not opened.steps:
        fail(f"{record} holds no committed step: nothing to check")
    request = Request(
        model=model or opened.header.model["path"],
        steps=steps or opened.steps[:1],
        dtype=dtype,
        device=device,
        temperature=temperature,
        previous=previous,
        base=base,
        scores_folder=scores_folder,
    )
    checked = check_under_progress(opened, request)
    gates = check_gates(gate, checked.diagnosis.measurement.metrics)
    if as_json:
        print_json(
            {"record": str(record), "model": request.model, "steps": request.steps} | document(checked, gates)
        )
    else:
        print_report(console(), checked, gates, request)
    raise SystemExit(exit_code(checked, gates))


def check_under_progress(record: "Record", request: "Request") -> "Checked":
    """The check, under a bar on standard error that moves by tokens and tells tokens/s."""
    import sys

    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    from consistency.check import check_record

    batches = [record.step(step).manifest.batches.values() for step in request.steps]
    total = sum(entry.num_tokens for batch in batches for entry in batch)
    columns = (TextColumn("scoring"), BarColumn(), TaskProgressColumn(show_speed=True))
    quiet = not sys.stderr.isatty()
    with Progress(*columns, console=console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task("scoring", total=total)
        return check_record(record, request, lambda num_tokens: progress.advance(task, num_tokens))
