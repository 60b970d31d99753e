"""`areal-debug replay`: run a record again without an inference engine, as it was or with something changed."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from areal_debug.render import console, errors_as_sentences, fail, print_json, with_progress

if TYPE_CHECKING:
    from recorder import Record


@click.command()
@click.argument("record", type=click.Path())
@click.option(
    "--from-step", type=int, help="First step to report; earlier ones are run if no anchor is nearer."
)
@click.option("--to-step", type=int, help="Last step to run.")
@click.option("--nproc", type=click.IntRange(min=1), help="Ranks; by default as many as recorded.")
@click.option("--model", type=click.Path(), help="Where the model that the run started from lies now.")
@click.option("--set", "settings", multiple=True, metavar="OPTION=VALUE", help="Set an option differently.")
@click.option("--filter", "row_filter", metavar="EXPR", help="Train only on rows for which this holds.")
@click.option(
    "--edit", type=click.Path(), help="Python file with edit(batch, step): returns the batch to train on."
)
@click.option("--reward", metavar="MODULE:FN", help="Compute every reward anew with this function.")
@click.option("--record-to", type=click.Path(), help="Record what this replay does into a new folder.")
@click.option(
    "--explain", type=int, metavar="STEP", help="Each sample's share of a step's loss and gradient."
)
@click.option("--json", "as_json", is_flag=True, help="The same facts as JSON.")
@errors_as_sentences
def command(
    record: str,
    from_step: int | None,
    to_step: int | None,
    nproc: int | None,
    model: str | None,
    settings: tuple[str, ...],
    row_filter: str | None,
    edit: str | None,
    reward: str | None,
    record_to: str | None,
    explain: int | None,
    as_json: bool,
) -> None:
    """Train again on the batches of RECORD, and compare every loss, gradient norm and parameter, bit by bit.

    \b
    Another shape:  --nproc 2, --set device=cpu, --set actor.mb_spec.max_tokens_per_mb=4096
    What if:        --set actor.eps_clip=0.3, --filter 'reward > 0 and len(completion) < 512', --edit, --reward
    Why:            --explain STEP

    A filter may ask for reward, prompt, completion (token ids), prompt_text, completion_text, finish_reason, logprobs, versions,
    prompt_id, sample_id and step. Nothing is ever written into RECORD.

    Exit code 0: as close to the record as the replay's shape promises; what if and why always. 1: not. 2: cannot tell.
    """
    from areal_debug.replay_ranks import replay_on_ranks
    from areal_debug.whatif_output import print_comparison
    from recorder import open_record
    from replayer.before import (
        check_anchor,
        check_edits,
        check_model,
        check_replayable,
        check_steps_present,
        step_range,
    )
    from replayer.options import replay_config
    from replayer.request import Request

    opened = open_record(record)
    check_replayable(opened)
    if explain is not None:
        explain_step(opened, explain, model, as_json)
        return
    first, last = step_range(opened, from_step, to_step)
    request = Request(record, first, last, model, settings, row_filter, edit, reward, record_to)
    check_edits(opened, request)
    replay_config(opened, model, settings)  # what is wrong with an option is told once, and at once
    check_steps_present(opened, first, last)
    check_anchor(opened, first)
    check_model(opened, model or opened.header.config["actor"]["path"], first)
    refuse_damage(record, len(opened.steps))
    if opened.uncommitted and not as_json:
        steps = ", ".join(map(str, opened.uncommitted))
        console(stderr=True).print(
            f"[yellow]not finished when the run ended, left out: step {steps}[/yellow]"
        )
    out = console()
    report = replay_on_ranks(
        request,
        nproc or opened.header.world_size,
        as_json,
        notify=lambda why: console(stderr=as_json).print(why, highlight=False),
    )
    if as_json:
        print_json(report.to_dict())
    elif report.guarantee.kind == "changed":
        print_comparison(out, report)
    else:
        from areal_debug.replay_output import print_verdict

        print_verdict(out, report)
    assert report.verdict is not None
    raise SystemExit(report.verdict.exit_code)


def explain_step(record: "Record", step: int, model: str | None, as_json: bool) -> None:
    """Name the samples that made a step what it was."""
    from areal_debug.explain_output import print_explanation
    from areal_debug.replay_ranks import report_of_ranks
    from replayer.before import check_model, check_steps_present, step_range

    step_range(record, step, step)
    check_steps_present(record, step, step)
    check_model(record, model or record.header.config["actor"]["path"], step)
    arguments = ["-m", "areal_debug.replay_rank", "explain", record.path, str(step), model or ""]
    found = report_of_ranks(arguments, record.header.world_size)
    if as_json:
        print_json(found)
    else:
        print_explanation(console(), record, found)


def refuse_damage(record: str | Path, num_steps: int) -> None:
    """End with code 1, naming the first damaged files and tensors, if any byte is not the one written."""
    from replayer.before import verify_bytes

    problems = with_progress("checking bytes", num_steps, lambda tick: verify_bytes(record, tick))
    if problems:
        named = "; ".join(str(problem) for problem in problems[:5])
        fail(f"the record is damaged: {named}", code=1)
