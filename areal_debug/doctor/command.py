"""`areal-debug doctor`: diagnose a run's metrics and recommend config changes."""

from pathlib import Path

import click

from areal_debug.cli import Verb, force_option, json_option, output_option
from areal_debug.confined import reads_untrusted
from areal_debug.render import console, errors_as_sentences, fail, print_json, refuse_existing


@click.command(cls=Verb, example="areal-debug doctor runs/logs -o report.html")
@click.argument("run", type=click.Path(path_type=Path))
@output_option("Write an HTML page with plots, too.")
@force_option
@click.option("--overrides", is_flag=True, help="Print only the config change that is recommended first.")
@json_option
@errors_as_sentences
def command(run: Path, output: Path | None, force: bool, overrides: bool, as_json: bool) -> None:
    """Diagnose the metrics of RUN, a record, folder or file: stats.jsonl, TensorBoard events, a
    Weights & Biases export, verl's file log, or trainer_state.json, with metric names of AReaL,
    NeMo-RL, prime-rl, SkyRL, slime, TRL or verl.

    Exit code 0: nothing is wrong. 1: a problem was found. 2: there are no metrics to judge.
    """
    from areal_debug.doctor.rows import is_record

    if output is not None:
        refuse_existing(output, force)
        if not output.parent.is_dir():
            fail(f"{output.parent} is not a folder: give --output a file in an existing folder")
    judge = judge_record if is_record(run) else judge_run
    judge(run=run, output=output, overrides=overrides, as_json=as_json)


def judge_run(run: Path, output: Path | None, overrides: bool, as_json: bool) -> None:
    """Judge a run, print the report, and end the command with its exit code."""
    from areal_debug.doctor.examine import document, examine, verdict
    from areal_debug.doctor.page import write_page
    from areal_debug.doctor.read import read_run
    from areal_debug.doctor.render import override_lines, print_examination

    read = read_run(run)
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
