"""`areal-debug goto`: open a shell or debugger at any step of a recorded run."""

from dataclasses import asdict
from pathlib import Path

import click

from areal_debug.cli import (
    Verb,
    code_option,
    force_option,
    json_option,
    model_option,
    nproc_option,
    output_option,
    step_option,
)
from areal_debug.goto.report import GotoOptions
from areal_debug.render import announce, console, is_quiet, print_json, refuse_existing
from areal_debug.waiting import leave_terminal

STAGES = ("batch", "advantages", "loss", "backward", "optimizer")


@click.command(cls=Verb, example="areal-debug goto runs/record --step 12 --shell")
@click.argument("record", type=click.Path())
@step_option("the last")
@click.option("--shell", is_flag=True, help="Open a Python shell there; each line runs on all ranks.")
@click.option("--pdb", "with_pdb", is_flag=True, help="Stop there in the debugger, inside the trainer.")
@click.option(
    "--at", "stage", type=click.Choice(STAGES), default="batch", show_default=True, help="Stage of the step."
)
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="The rank of --pdb.")
@output_option("Write the weights before the step into this folder, as a Hugging Face model.")
@force_option
@model_option
@code_option
@nproc_option
@click.option("--keep-going", is_flag=True, help="Continue after a step that differs from its record.")
@json_option
def command(
    record: str,
    step: int | None,
    shell: bool,
    with_pdb: bool,
    stage: str,
    rank: int,
    output: Path | None,
    force: bool,
    model: str | None,
    nproc: int | None,
    keep_going: bool,
    as_json: bool,
) -> None:
    """Replay RECORD from the nearest anchor (a checkpoint in the record) up to a step, and stop
    there.

    Every bit on the way is compared. The shell has model, optimizer, batch, plan and outcome (as
    recorded), trainer, tokenizer, and what the stage has computed: inputs with their advantages,
    logprobs and loss, gradients.

    Exit code 0: reached, every bit as recorded. 1: an earlier step, or the weights, differ from the
    record.
    """
    from areal_debug.replay.ranks import placed, task
    from recorder import open_record
    from replayer.preconditions import (
        check_anchor,
        check_model,
        check_recorded_results,
        check_steps_present,
        exact_summation,
        step_range,
    )

    do = check_action(shell, with_pdb, stage, as_json)
    refuse_existing(output, force)
    opened = open_record(record)
    check_recorded_results(opened, "goto")
    size = opened.header.world_size
    if rank >= size:
        raise ValueError(f"--rank {rank}: the record has ranks 0 to {size - 1}")
    num_ranks = nproc or size
    virtual = exact_summation(opened, num_ranks, "goto")
    step = step_range(opened, step, step)[1]
    check_steps_present(opened, step, step)
    check_anchor(opened, step)
    check_model(opened, model, step)
    save = None if output is None else str(output)
    options = GotoOptions(
        stage, do, rank, model, save, keep_going, as_json or (is_quiet() and not do), virtual
    )
    announce(f"going to step {step} of {record} on {placed(opened, virtual, num_ranks)}")
    report = run_attached(task("goto", record=record, step=step, options=asdict(options)), num_ranks)
    if as_json:
        print_json(report)
    elif is_quiet() and not do:
        console().print("all identical" if report["faithful"] else "not faithful", f"up to step {step}")
    raise SystemExit(0 if report["faithful"] else 1)


def check_action(shell: bool, with_pdb: bool, stage: str, as_json: bool) -> str:
    """Return "shell", "pdb" or "" for neither.

    Raises ValueError for options that exclude each other.
    """
    if shell and with_pdb:
        raise ValueError("--shell and --pdb exclude each other: choose one")
    if (shell or with_pdb) and as_json:
        raise ValueError("--json excludes --shell and --pdb, which are interactive: choose one")
    if stage != "batch" and not (shell or with_pdb):
        raise ValueError(f"--at {stage} chooses where to stop: add --shell or --pdb")
    return "shell" if shell else "pdb" if with_pdb else ""


def run_attached(asked: list[str], num_ranks: int) -> dict[str, object]:
    """Run a task on ranks with this terminal; return its report.

    A failure ends the command with their exit code.
    """
    from areal_debug.replay.ranks import replay_ranks, reported

    with replay_ranks(attached=True) as ranks:
        leave_terminal(keeps_line=True)  # to the ranks
        return reported(
            lambda folder, env: ranks.run_attached(asked, num_ranks, env),
            "it reached the step; its output is above",
        )
