"""`areal-debug replay`: run a record again without an engine, unchanged or with changes."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from areal_debug.cli import (
    Verb,
    code_option,
    force_option,
    json_option,
    model_option,
    nproc_option,
    output_option,
    overrides_argument,
    step_option,
)
from areal_debug.render import announce, console, fail, is_quiet, note, refuse_existing

if TYPE_CHECKING:
    from areal_core.launch.warm import WarmRanks
    from areal_debug.reward.rescore import RescoreReport
    from recorder import Record
    from replayer.check import ReplayReport
    from replayer.request import Request

EXAMINES = ("explain", "anatomy", "layouts")  # questions about one step


@click.command(
    cls=Verb,
    example="areal-debug replay runs/record\n"
    "areal-debug replay runs/record actor.eps_clip=0.3 --filter 'reward > 0' -o runs/what-if\n"
    "areal-debug replay runs/record --sweep actor.eps_clip=0.1,0.2,0.3\n"
    "areal-debug replay runs/record --find-faulty",
)
@click.argument("record", type=click.Path())
@click.option(
    "--from-step",
    type=int,
    metavar="N",
    help="First step to report; earlier ones are run if no anchor is nearer.",
)
@click.option("--to-step", type=int, metavar="N", help="Last step to run.")
@nproc_option
@model_option
@code_option
@click.option(
    "--config",
    type=click.Path(),
    metavar="FILE",
    help="Options to train with, for a record of another trainer.",
)
@click.option("--set", "settings", multiple=True, hidden=True)
@click.option("--filter", "row_filter", metavar="EXPR", help="Train only on rows for which this is true.")
@click.option(
    "--edit", type=click.Path(), help="Python file with edit(batch, step): returns the batch to train on."
)
@click.option(
    "--reward",
    metavar="MODULE:FN",
    help="Compute every reward again with this function, and list where it disagrees (see `reward rescore`).",
)
@output_option("New folder to record this replay into; with --explain, --anatomy or --layouts one HTML page.")
@force_option
@click.option(
    "--explain", type=int, metavar="STEP", help="Each sample's share of a step's loss and gradient."
)
@click.option(
    "--anatomy",
    is_flag=True,
    help="Share and direction of each loss term, class of token, turn and row in the gradient of --step.",
)
@click.option(
    "--layouts",
    is_flag=True,
    help="Compute --step in other micro-batches, order, padding, ranks (of TRL's record by TRL): nothing may change.",
)
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="OPTION=A,B,...",
    help="Replay once with each of these values, and compare. May be repeated: every combination.",
)
@click.option(
    "--find-faulty",
    is_flag=True,
    help="Say which rank computed wrongly: replay repeatedly, on other GPUs where there are any, and vote.",
)
@step_option("the first that differs, with --find-faulty; required with --anatomy")
@json_option
@overrides_argument
def command(
    record: str,
    from_step: int | None,
    to_step: int | None,
    nproc: int | None,
    model: str | None,
    config: str | None,
    settings: tuple[str, ...],
    row_filter: str | None,
    edit: str | None,
    reward: str | None,
    output: Path | None,
    force: bool,
    explain: int | None,
    anatomy: bool,
    layouts: bool,
    sweeps: tuple[str, ...],
    find_faulty: bool,
    step: int | None,
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Train again on the batches of RECORD, and compare every loss, gradient norm and parameter,
    bit by bit.

    \b
    Another layout:  --nproc 2, device=cpu, actor.mb_spec.max_tokens_per_mb=4096
    What if:         actor.eps_clip=0.3, --filter 'reward > 0 and len(completion) < 512', --edit, --reward
    Why:             --explain STEP, --step N --anatomy
    Layout bugs:     --step N --layouts
    Who:             --find-faulty

    A filter may use reward, prompt, completion (token ids), prompt_text, completion_text,
    finish_reason, logprobs, versions, prompt_id, sample_id and step. RECORD is never written to.

    Exit code 0: within the tolerance of the replay's layout; always for what-if and --explain. 1:
    beyond it; a dead term or gradient outside of the mask (--anatomy), or a number that depends on
    the layout (--layouts). 2: inconclusive.
    """
    from areal_debug.replay.faulty import find
    from areal_debug.replay.ranks import placed, replay_ranks
    from replayer.preconditions import step_range
    from replayer.request import Request

    opened = opened_for(record, config, layouts)
    changed = [*settings, *overrides, *filter(None, (row_filter, edit, reward)), *sweeps]
    asked = zip((*EXAMINES, "find-faulty"), (explain is not None, anatomy, layouts, find_faulty), strict=True)
    num_ranks = nproc or opened.header.world_size
    kind = question_of([kind for kind, is_asked in asked if is_asked], step, changed, output)
    if kind == "find-faulty":
        steps = (from_step, to_step) if step is None else (step, step)
        find(opened, *step_range(opened, *steps), model, num_ranks, as_json)
    if kind:
        at = step if explain is None else explain
        examine_step(opened, at, kind, num_ranks, model, config, as_json, output, force)
    first, last = step_range(opened, from_step, to_step)
    if sweeps and output is not None:
        fail("--output is for one replay, and --sweep makes several")
    rescored = None if reward is None else compare_rewards(opened, reward, first, last, as_json)
    changes = (*settings, *overrides)
    record_to = None if output is None else str(output)
    request = Request(record, first, last, model, changes, row_filter, edit, reward, record_to, config=config)
    request = as_recorded_ranks(opened, request, num_ranks)
    if sweeps:
        sweep_options(opened, request, sweeps, num_ranks, as_json)
        return
    announce(f"replaying steps {first} to {last} of {record} on {placed(opened, request.virtual, num_ranks)}")
    with replay_ranks() as ranks:
        check_request(opened, request, force)
        report = run_replay(ranks, opened, request, num_ranks, as_json)
    print_replay(report, request, as_json, rescored)
    assert report.verdict is not None
    raise SystemExit(report.verdict.exit_code)


def opened_for(path: str, config: str | None, layouts: bool = False) -> "Record":
    """Open a record that can be replayed with these options, in `layouts` also by TRL itself."""
    from areal_debug.replay.report import note_cut
    from recorder import open_record
    from replayer.preconditions import check_options, has_layouts_by_trl

    record = open_record(path)
    note_cut(record)
    if config is not None and record.header.trainer is None:
        fail("--config is for records of other trainers: change options of this one as OPTION=VALUE")
    if not (layouts and has_layouts_by_trl(record, config)):
        check_options(record, config)
    return record


def sweep_options(
    record: "Record", request: "Request", sweeps: Sequence[str], num_ranks: int, as_json: bool
) -> None:
    """Replay once with each combination of values, and compare."""
    from areal_debug.replay.ranks import replay_on_ranks, replay_ranks
    from areal_debug.replay.sweep import print_sweep, requests_of
    from replayer.request import replay_config

    requests = requests_of(request, sweeps)
    for one in requests.values():
        replay_config(record, one.model, one.settings, one.config)
    check_request(record, request, force=False)
    reports = {}
    with replay_ranks() as ranks:
        for name, one in requests.items():
            announce(f"replaying with {name}")
            reports[name] = replay_on_ranks(ranks, one, num_ranks, quiet=True)
    print_sweep(reports, as_json)


def as_recorded_ranks(record: "Record", request: "Request", num_ranks: int) -> "Request":
    """Let fewer processes compute the share of every recorded rank, where the record allows it."""
    from dataclasses import replace

    from replayer.preconditions import summation_on

    request = replace(request, virtual=summation_on(record, num_ranks, request.settings))
    size = record.header.world_size
    if num_ranks < size and size % num_ranks and not record.header.trainer:
        note(
            f"{num_ranks} is no divisor of {size} ranks, so rows are redistributed: a divisor gives the bits"
        )
    elif num_ranks < size and record.header.config_is_ours and not request.virtual:
        note("rows are redistributed over fewer ranks: debug.reduction=fixed records what they can repeat")
    return request


def question_of(
    kinds: Sequence[str], step: int | None, changed: Sequence[object], output: Path | None
) -> str:
    """Return the one question that is asked about recorded steps as they are; "" for a replay."""
    if not kinds:
        if step is not None:
            fail("--step chooses what to examine: --from-step and --to-step choose what is replayed")
        return ""
    if len(kinds) > 1:
        fail(f"--{kinds[0]} and --{kinds[1]} are questions of their own: ask one of them")
    if kinds[0] == "find-faulty" and output is not None:
        fail("--find-faulty prints its report, and --output is for a replay: leave that out")
    if changed:
        fail(f"--{kinds[0]} is about the record as it is, and {changed[0]} would change it: leave that out")
    if kinds[0] in ("anatomy", "layouts") and step is None:
        fail(f"--{kinds[0]} is about one step: add --step N")
    return kinds[0]


def compare_rewards(record: "Record", function: str, first: int, last: int, as_json: bool) -> "RescoreReport":
    """Score the steps again and print on which samples the rewards disagree; needs no model."""
    from replayer.preconditions import check_is_policy

    check_is_policy(record, "--reward")
    from areal_debug.report.terminal import print_report
    from areal_debug.reward.report import report_of_rescore
    from areal_debug.reward.rescore import TIMEOUT_S, rescore

    steps = [step for step in record.steps if first <= step <= last]
    report = rescore(record, function, None, steps, TIMEOUT_S)
    if not as_json and report.num_compared:
        print_report(console(), report_of_rescore(report))
    return report


def check_request(record: "Record", request: "Request", force: bool) -> None:
    """Check all inputs before a process starts, cheapest first; then clear the output with `force`.

    Raises ReplayError, RecordError or ConfigError. A damaged record ends the command with code 1.
    """
    from dataclasses import replace

    from areal_debug.replay.ranks import refuse_damage
    from areal_debug.train.script_options import clear_for_record
    from replayer.preconditions import (
        check_anchor,
        check_edits,
        check_model,
        check_steps_present,
        check_values,
    )
    from replayer.request import replay_config

    check_edits(record, replace(request, record_to=None) if force else request)
    config = replay_config(record, request.model, request.settings, request.config)
    check_steps_present(record, request.first, request.last)
    check_anchor(record, request.first)
    check_model(record, config.actor.path, request.first)
    check_values(record, config, 0, request.last, request.reward is not None)
    refuse_damage(request.record, len(record.steps))
    if force and request.record_to is not None:
        clear_for_record(Path(request.record_to), request.record)


def run_replay(
    ranks: "WarmRanks", record: "Record", request: "Request", num_ranks: int, as_json: bool
) -> "ReplayReport":
    from areal_debug.replay.ranks import replay_on_ranks
    from replayer.preconditions import stand_ins

    for sentence in stand_ins(record, request.last):
        note(sentence)
    if record.uncommitted and not as_json:
        note(f"not finished when the run ended, left out: step {', '.join(map(str, record.uncommitted))}")
    hidden = as_json or is_quiet()

    def report_rerun(why: str) -> None:
        if not is_quiet():
            console(stderr=as_json).print(why, highlight=False)

    return replay_on_ranks(ranks, request, num_ranks, hidden, report_rerun)


def print_replay(
    report: "ReplayReport", request: "Request", as_json: bool, rescored: "RescoreReport | None"
) -> None:
    """Print the verdict, or the comparison with the record where options were changed."""
    from dataclasses import asdict

    from areal_debug.replay.report import next_commands, report_of, report_of_comparison
    from areal_debug.report.terminal import print_answer

    disagreements = {} if rescored is None else {"rescored": asdict(rescored)}
    document = report.to_dict() | {"next": next_commands(report, request)} | disagreements
    is_what_if = report.guarantee.kind == "changed"
    print_answer(
        document, report_of_comparison(report) if is_what_if else report_of(report, request), as_json
    )


def examine_step(
    record: "Record",
    step: int | None,
    kind: str,
    num_ranks: int,
    model: str | None,
    config: str | None,
    as_json: bool,
    page: Path | None,
    force: bool,
) -> NoReturn:
    """Print what each sample (and part, and layout) makes of a step; ends the command."""
    from areal_debug.replay.ranks import replay_ranks, report_of_ranks, task
    from areal_debug.replay.report import EXAMINED
    from areal_debug.report.frame import Frame
    from areal_debug.report.page import write_report
    from areal_debug.report.terminal import print_answer
    from replayer.preconditions import (
        check_by_trl,
        check_is_policy,
        check_model,
        check_steps_present,
        check_values,
        exact_summation,
        has_layouts_by_trl,
        step_range,
    )
    from replayer.request import replay_config

    assert step is not None
    if page is not None:
        if page.suffix != ".html":
            fail(f"--output is {page}: --{kind} writes one page, so give a name that ends in .html")
        refuse_existing(page, force)
    check_is_policy(record, f"--{kind}")
    step_range(record, step, step)
    check_steps_present(record, step, step)
    given = {"record": record.path, "step": step, "model": model, "config": config}
    given["virtual"] = exact_summation(record, num_ranks, f"--{kind}")
    announce(f"explaining step {step} of {record.path}")
    with replay_ranks() as ranks:
        if kind == "layouts" and has_layouts_by_trl(record, config):
            check_by_trl(record, "GRPOTrainer")
            check_model(record, model or record.header.model["path"], step)
        else:
            options = replay_config(record, model, file=config)
            check_model(record, options.actor.path, step)
            check_values(record, options, 0, step)
        found = report_of_ranks(ranks, task(kind, **given), num_ranks)
    shown = EXAMINED[kind](record, found)
    if page is not None:
        write_report(page, shown, Frame(f"{shown.verdict}: {shown.sentence}", str(record.path), "replay"))
    print_answer(found, shown, as_json)
    raise SystemExit(int(kind != "explain" and shown.level == "bad"))
