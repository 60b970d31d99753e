"""`areal-debug doctor`: diagnose a run's metrics and recommend config changes."""

from pathlib import Path

import click

from areal_debug.cli import Verb, force_option, json_option, output_option
from areal_debug.confined import reads_untrusted
from areal_debug.render import console, errors_as_sentences, fail, print_json, refuse_existing


@click.command(cls=Verb, example="areal-debug doctor runs/logs -o report.html")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--run", "name", metavar="NAME", help="Which run, where RUN holds several.")
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="QUANTITY=NAME",
    help="Name under which this run logs a quantity, as reward=my_env/return; may be repeated.",
)
@output_option("Write an HTML page with plots, too.")
@force_option
@click.option("--overrides", is_flag=True, help="Print only the config change that is recommended first.")
@json_option
@errors_as_sentences
def command(
    run: Path,
    name: str | None,
    metrics: tuple[str, ...],
    output: Path | None,
    force: bool,
    overrides: bool,
    as_json: bool,
) -> None:
    """Diagnose the metrics of RUN, a record, folder or file.

    Files: stats.jsonl, trainer_state.json, TensorBoard events, Weights & Biases (.wandb of offline
    runs, exports as CSV or JSON), Trackio (.db, .parquet), JSON lines as of verl's file logger, and
    what frameworks print (.log, .out, .txt). Names of metrics: of AReaL, miles, NeMo-RL, OpenRLHF,
    prime-rl, SkyRL, slime, TRL, verl, and others that end alike.

    Exit code 0: nothing is wrong. 1: a problem was found. 2: there are no metrics to judge.
    """
    from areal_debug.doctor.rows import is_record

    if output is not None:
        refuse_existing(output, force)
        if not output.parent.is_dir():
            fail(f"{output.parent} is not a folder: give --output a file in an existing folder")
    judge = judge_record if is_record(run) else judge_run
    judge(
        run=run,
        name=name,
        given=dict(split_metric(metric) for metric in metrics),
        output=output,
        overrides=overrides,
        as_json=as_json,
    )


def split_metric(text: str) -> tuple[str, str]:
    """Return quantity and name of QUANTITY=NAME. Raises ValueError."""
    quantity, separator, name = text.partition("=")
    if not (quantity and separator and name):
        raise ValueError(f"--metric {text!r} is not QUANTITY=NAME, as in reward=my_env/return")
    return quantity, name


def judge_run(
    run: Path, name: str | None, given: dict[str, str], output: Path | None, overrides: bool, as_json: bool
) -> None:
    """Judge a run, print the report, and end the command with its exit code."""
    from areal_debug.doctor.examine import document, examine, verdict
    from areal_debug.doctor.page import write_page
    from areal_debug.doctor.read import read_run
    from areal_debug.doctor.render import override_lines, print_examination

    read = read_run(run, name, given)
    found = examine(read)
    if output is not None:
        write_page(output, read, found)
    if as_json:
        print_json(document(read, found))
    elif overrides:
        for line in override_lines(found):
            click.echo(line)
    else:
        print_examination(console(), read, found)
    raise SystemExit({"problem": 1, "healthy": 0, "unknown": 2}[verdict(read, found)])


judge_record = reads_untrusted("run", outputs="output")(judge_run)
