"""`areal-debug why`: say in one sentence why two records differ, or a record and its replay."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from areal_debug.cli import Verb, force_option, json_option, model_option, output_option
from areal_debug.render import announce, errors_as_sentences, print_json, refuse_existing

if TYPE_CHECKING:
    from areal_debug.replay.ranks import Runner
    from recorder import Record
    from replayer.why.proofs import Options
    from replayer.why.report import WhyReport


@click.command(cls=Verb, example="areal-debug why runs/A runs/B\nareal-debug why runs/record --html why.html")
@click.argument("left", metavar="A", type=click.Path())
@click.argument("right", metavar="[B]", type=click.Path(), required=False)
@click.option(
    "--repository",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Checkout that has the recorded commits; by default that of this code.",
)
@model_option
@click.option(
    "--no-replay", is_flag=True, help="Judge from the records alone: start no replay and ask no engine."
)
@output_option("Write the answer as one HTML page, too.", spellings=("--html",))
@force_option
@json_option
@errors_as_sentences
def command(
    left: str,
    right: str | None,
    repository: Path | None,
    model: str | None,
    no_replay: bool,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Say in one sentence why records A and B differ: the step, stage, tensor, row and token, the
    pattern of the difference, and the option, commit, file, variable, data or engine that made it.

    Without B, A is replayed, and the replay takes B's place. Where several causes remain, steps of
    A are run again: with B's options, by each commit that can act, and with the weights that an
    engine should have had.

    Exit code 0: all common steps have the same bits. 1: they differ, explained or not. 2: the
    records cannot be compared.
    """
    from areal_debug.consistency.engine_question import ask_with_recorded_weights
    from areal_debug.replay.ranks import runner
    from replayer.why.proofs import Options

    if output is not None:
        refuse_existing(output, force)
    with runner(model) as run:
        options = Options(repository or Path(__file__).parents[2], model, note=announce)
        if not no_replay:
            options = replace(
                options,
                replay=lambda record, step, *given, **apart: run.replay(record, step, step, *given, **apart),
                ask_engines=ask_with_recorded_weights,
            )
        report = explain_both(left, right, options) if right else explain_replay(left, options, run)
    if output is not None:
        from areal_debug.why.page import write_page

        write_page(output, report)
    if as_json:
        print_json(report.to_dict())
    else:
        from areal_debug.why.render import print_report

        print_report(report, output)
    raise SystemExit(report.exit_code)


def explain_both(left: str, right: str, options: "Options") -> "WhyReport":
    from recorder import open_record
    from replayer.why.chain import explain

    here, there = open_record(left), open_record(right)
    options.note(f"comparing {left} and {right}")
    return with_text(here, there, explain(here, there, options))


def explain_replay(record: str, options: "Options", run: "Runner") -> "WhyReport":
    """Replay a record, and compare it with its replay.

    Raises ReplayError if that is not allowed, or not possible.
    """
    from recorder import open_record
    from replayer.errors import ReplayError
    from replayer.preconditions import check_recorded_results
    from replayer.why.chain import explain

    if options.replay is None:
        raise ReplayError("without B, A is replayed: give a second record, or leave out --no-replay")
    opened = open_record(record)
    check_recorded_results(opened, "why")
    options.note(f"replaying {record}")
    replayed = run.replay(opened, opened.steps[0], opened.steps[-1])
    if replayed is None:
        raise ReplayError(f"{record} could not be replayed here: see areal-debug replay {record}")
    report = with_text(opened, replayed, explain(opened, replayed, options, is_replay=True))
    return replace(report, right=f"a replay of {record}")


def with_text(left: "Record", right: "Record", report: "WhyReport") -> "WhyReport":
    """Add the text around the first token that differs, on both sides, and where to look at it."""
    from areal_debug.diff.excerpts import read_excerpts
    from areal_debug.report.links import view_command

    step, first = report.step, report.difference
    if first is None or step is None:
        return report
    if (place := first.place) is not None:
        look = view_command(left.path, step, place.prompt_id, place.sample_id, place.token)
        report = replace(report, look=look)
    return replace(report, text=read_excerpts(left, right, step, first))
