"""`areal-debug parity`: check that training computes a model's own log-probs."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_debug.cli import Verb, json_option
from areal_debug.render import (
    announce,
    console,
    errors_as_sentences,
    fail,
    format_number,
    format_seconds,
    is_quiet,
    print_json,
    read_report,
)

if TYPE_CHECKING:
    from areal_debug.report.model import Report

DTYPES = ("bfloat16", "float32", "float16")


@click.command(cls=Verb, example="areal-debug parity Qwen/Qwen2.5-0.5B-Instruct --dtype float32")
@click.argument("model", type=click.Path())
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True, help="Of compute.")
@click.option(
    "--allocation",
    default="fsdp:d1",
    show_default=True,
    help="Ranks of this machine that share the model: fsdp:d2, fsdp:c2, fsdp:t2.",
)
@json_option
@errors_as_sentences
def command(model: str, dtype: str, allocation: str, as_json: bool) -> None:
    """Compare the log-probs that training computes for a model with those of its own forward.

    A few rows of random tokens are computed as training does, packed and on the given ranks, and
    one at a time by the model's class in Transformers. `train` does the same before its first step,
    unless `actor.parity_check` is false.

    Exit code 0: equal within rounding. 1: different; training would refuse the model. 2: the model
    cannot be loaded or split.
    """
    from areal_core.config.allocation import parse_allocation
    from areal_debug.report.terminal import print_report

    train = parse_allocation(allocation).train
    if train is None:
        raise ValueError(f"--allocation {allocation!r} has no training part: give one such as fsdp:d2")
    sizes = {"context": train.context, "tensor": train.tensor}
    announce(f"checking {model} as {train}")
    report = measure_on_ranks(model, dtype, sizes, train.world_size)
    if as_json:
        print_json(report | {"allocation": str(train)})
    else:
        print_report(console(), report_of(model, str(train), report))
    raise SystemExit(0 if report["is_equal"] else 1)


def measure_on_ranks(model: str, dtype: str, sizes: dict[str, int], num_ranks: int) -> dict[str, Any]:
    """Run `areal_debug.parity.on_ranks` and return the report of rank 0.

    Ends the command with the ranks' exit code if they fail.
    """
    from areal_core.launch.torchrun import run_ranks
    from areal_debug.render import REPORT_FILE, print_log_end

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        arguments = ["-m", "areal_debug.parity.on_ranks", model, dtype, *map(str, sizes.values())]
        code = run_ranks(arguments, num_ranks, {REPORT_FILE: str(file)}, Path(folder), echo=not is_quiet())
        if code != 0 or not file.exists():
            if is_quiet():
                print_log_end(Path(folder) / "trainer.log")
            fail(f"the model could not be checked: the ranks ended with exit code {code}", code or 1)
        return read_report(file)


def report_of(model: str, allocation: str, report: dict[str, Any]) -> "Report":
    """Return the report of one model."""
    from areal_debug.report.model import Facts, Report, Row, rows_of

    subject = f"{model} ({report['model_type']}) in {report['dtype']} on {allocation}"
    packing = "packed" if report["packs_rows"] else "computed one at a time"
    rows = [
        Row("rows", f"{packing}; of {', '.join(map(str, report['lengths']))} tokens"),
        Row("largest difference", f"{format_number(report['difference'])} nats"),
        Row("tolerance", f"{format_number(report['tolerance'])} nats, of rounding in {report['dtype']}"),
    ]
    if report["reason"] is not None:
        rows.append(Row("reason", str(report["reason"])))
    if not report["packs_rows"] and report["packed_difference"] is not None:
        rows.append(Row("packed rows", f"would differ by {format_number(report['packed_difference'])} nats"))
    rows += rows_of("not checked", report["unchecked"])
    times = f"{format_seconds(report['check_s'])}, after {format_seconds(report['load_s'])} of loading"
    rows.append(Row("time", times))
    if report["is_equal"]:
        return Report(
            "Equal", f"{subject} trains on the log-probs of its own forward.", "good", [Facts(rows)]
        )
    sentence = f"{subject} would train on other log-probs than its own."
    return Report("Different", sentence, "bad", [Facts(rows)])
