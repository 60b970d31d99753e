"""`areal-debug why`: say in one sentence why two records differ, or a record and its replay."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from areal_core.safety.printable import printable
from areal_debug.cli import (
    Verb,
    code_option,
    force_option,
    json_option,
    model_option,
    output_option,
    step_option,
)
from areal_debug.confined import ANYWHERE, reads_untrusted
from areal_debug.render import announce, console, note, refuse_existing, styled, with_progress
from areal_debug.report.terminal import answer, print_answer

if TYPE_CHECKING:
    from areal_debug.replay.ranks import Runner
    from recorder import Record
    from replayer.why.proofs import Options
    from replayer.why.report import WhyReport


DEFAULT_STEPS = 5  # that --commits compares


@click.command(
    cls=Verb,
    example="areal-debug why runs/A runs/B\nareal-debug why runs/A runs/B --all\n"
    "areal-debug why runs/record --commits v1..HEAD",
)
@click.argument("left", metavar="A", type=click.Path())
@click.argument("right", metavar="[B]", type=click.Path(), required=False)
@click.option(
    "--repository",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Checkout that has the recorded commits; by default that of this code.",
)
@model_option
@code_option
@click.option(
    "--no-replay", is_flag=True, help="Judge from the records alone: start no replay and ask no engine."
)
@click.option(
    "--fast", is_flag=True, help="Compare recorded checksums; do not read bytes where they are equal."
)
@click.option("--all", "show_all", is_flag=True, help="List every stage, and all differences of a step.")
@step_option("all steps, up to the first that differs")
@click.option("--layers", is_flag=True, help="Find the first step and layer that differ, by replays of both.")
@click.option("--commits", metavar="GOOD..BAD", help="Find the commit that changed A's numbers, by replays.")
@click.option("--to-step", type=int, help=f"With --commits: last step; by default A's first {DEFAULT_STEPS}.")
@output_option("Also write the answer as one HTML page.", spellings=("--html",))
@force_option
@json_option
def command(
    left: str,
    right: str | None,
    repository: Path | None,
    model: str | None,
    no_replay: bool,
    fast: bool,
    show_all: bool,
    step: int | None,
    layers: bool,
    commits: str | None,
    to_step: int | None,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Say in one sentence why records A and B differ: the step, stage, tensor, row and token, the
    pattern of the difference, and the option, commit, file, variable, data or engine that made it.

    Without B, A is replayed, and the replay takes B's place. Where several causes remain, steps of
    A are run again: with B's options, by each commit that can act, and with the weights that an
    engine should have had. --all, --layers and --commits show what else there is to see.

    Exit code 0: all common steps have the same bits. 1: they differ, explained or not. 2: the
    records cannot be compared.
    """
    code = repository or Path(__file__).parents[2]
    if commits is not None:
        good, _, bad = commits.partition("..")
        search(left, good, bad or "HEAD", code, step, to_step, model, as_json)
    if right is None and (show_all or layers or step is not None):
        raise ValueError("--all, --step and --layers compare A with B: give both records")
    if right is not None and (show_all or step is not None):
        compare_stages(left=left, right=right, step=step, show_all=show_all, fast=fast, as_json=as_json)
    if layers and right is not None:
        compare_layers(left, right, not no_replay, code, model, fast, as_json)
    from areal_debug.consistency.engine_question import ask_with_recorded_weights
    from areal_debug.replay.ranks import runner
    from areal_debug.report.frame import Frame
    from areal_debug.report.page import write_report
    from areal_debug.why.report import report_of
    from replayer.why.proofs import Options

    refuse_existing(output, force)
    with runner(model) as run:
        options = Options(code, model, note=announce, fast=fast)
        if not no_replay:
            options = replace(
                options,
                replay=lambda record, step, *given, **apart: run.replay(record, step, step, *given, **apart),
                ask_engines=ask_with_recorded_weights,
            )
        report = explain_both(left, right, options) if right else explain_replay(left, options, run)
    shown = report_of(report)
    if output is not None:
        frame = Frame(report.sentence, f"{report.left} and {report.right}", "why", report.verdict)
        write_report(output, shown, frame)
    print_answer(report.to_dict(), shown, as_json)
    if output is not None and not as_json:
        console().print(styled("[dim]{:<12}[/dim] {}", "page", output))
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
    from areal_debug.diff.report import excerpts_of
    from areal_debug.report.links import view_command

    step, first = report.step, report.difference
    if first is None or step is None:
        return report
    if (place := first.place) is not None:
        look = view_command(left.path, step, place.prompt_id, place.sample_id, place.token)
        report = replace(report, look=look)
    return replace(report, text=excerpts_of(left, right, step, first))


@reads_untrusted("left", "right", reads=ANYWHERE)
def compare_stages(
    left: str, right: str, step: int | None, show_all: bool, fast: bool, as_json: bool
) -> None:
    """Compare all stages of the first step that differs, or of one step; ends the command."""
    from areal_debug.diff.report import report_of_diff
    from recorder import open_record
    from replayer.diff import diff_records

    here, there = open_record(left), open_record(right)
    total = len(set(here.steps) & set(there.steps)) if step is None else 1
    report = with_progress("comparing steps", total, lambda tick: diff_records(here, there, step, tick, fast))
    answer(report.to_dict(), report_of_diff(here, there, report, show_all), as_json)


def compare_layers(
    left: str, right: str, layers: bool, code: Path, model: str | None, fast: bool, as_json: bool
) -> NoReturn:
    """Find the first step after which the weights differ, by their checksums, and its first layer.

    Ends the command: with code 0 if the weights never differ, else with 1.
    """
    from areal_debug.diff.report import report_of_first_step
    from recorder import open_record
    from replayer.commits.first_step import bisect_steps
    from replayer.commits.warm import layers_with_own_code
    from replayer.diff import diff_records
    from replayer.errors import ReplayError

    here, there = open_record(left), open_record(right)
    announce(f"comparing the weights of {left} and {right}")
    found = bisect_steps(here, there, fast)
    report, traced = None if found.step is None else diff_records(here, there, found.step), None
    if layers and found.step is not None:
        announce(f"replaying step {found.step} of both, each with its own code")
        try:
            traced = layers_with_own_code(here, there, found.step, model, code)
        except ReplayError as error:  # the step is an answer without it
            note(printable(f"layers are not traced: {error}", 500))
    facts = {"diff": report and report.to_dict(), "layers": traced and asdict(traced)}
    answer(asdict(found) | facts, report_of_first_step(found, here, there, report, traced), as_json)


def search(
    record: str,
    good: str,
    bad: str,
    code: Path,
    from_step: int | None,
    to_step: int | None,
    model: str | None,
    as_json: bool,
) -> NoReturn:
    """Find the commit between two revisions that changed the numbers of a record; ends the command.

    Replays it with the code of commits, checked out in a private folder: about log2(number of
    commits) replays. The user's repository is not touched.
    """
    from areal_debug.diff.report import report_of_culprit
    from areal_debug.replay.ranks import refuse_damage
    from recorder import open_record
    from replayer.commits.warm import search_commits
    from replayer.preconditions import check_model, check_recorded_results, check_steps_present, step_range
    from replayer.request import Request

    opened = open_record(record)
    check_recorded_results(opened, "why --commits")
    first, last = step_range(opened, from_step, to_step)
    if to_step is None:
        last = min(last, first + DEFAULT_STEPS - 1)
    check_steps_present(opened, first, last)
    check_model(opened, model, first)
    announce(f"searching {good}..{bad} for the commit that changed the numbers of {record}")
    refuse_damage(record, len(opened.steps))
    request = Request(record, first, last, model)
    report = search_commits(request, code, good, bad, opened.header.world_size, note)
    answer(report.to_dict(), report_of_culprit(report), as_json)
