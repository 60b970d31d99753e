"""`areal-debug goto`: stand at any step of a recorded run, with everything that it had in hand there."""

import json
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import click

from areal_debug.goto_output import GotoOptions
from areal_debug.render import errors_as_sentences, fail, print_json

STAGES = ("batch", "advantages", "loss", "backward", "optimizer")


@click.command()
@click.argument("record", type=click.Path())
@click.option("--step", type=int, required=True, help="The step to go to.")
@click.option("--shell", is_flag=True, help="Open a Python shell there, on all ranks in step.")
@click.option("--pdb", "with_pdb", is_flag=True, help="Stop there in the debugger, inside the trainer.")
@click.option(
    "--at", "stage", type=click.Choice(STAGES), default="batch", show_default=True, help="Where in the step."
)
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="The rank of --pdb.")
@click.option("--save", type=click.Path(), help="Write the weights before the step here, as a model folder.")
@click.option("--model", type=click.Path(), help="Where the model that the run started from lies now.")
@click.option("--keep-going", is_flag=True, help="Go on after a step that differs from its record.")
@click.option("--json", "as_json", is_flag=True, help="The same facts as JSON.")
@errors_as_sentences
def command(
    record: str,
    step: int,
    shell: bool,
    with_pdb: bool,
    stage: str,
    rank: int,
    save: str | None,
    model: str | None,
    keep_going: bool,
    as_json: bool,
) -> None:
    """Replay RECORD from the nearest anchor up to a step, comparing every bit on the way, and stand still there.

    In hand: model, optimizer, batch, plan and outcome (as recorded), trainer, tokenizer, and what the stage has computed:
    inputs with their advantages, logprobs and loss, gradients.

    Exit code 0: reached, every bit as recorded. 1: a step on the way, or the weights, differ from the record.
    """
    from recorder import open_record
    from replayer.before import check_anchor, check_model, check_steps_present, step_range

    if shell and with_pdb:
        raise ValueError("--shell and --pdb exclude each other: choose one")
    if (shell or with_pdb) and as_json:
        raise ValueError("--json is for a goto that nobody sits at: leave out --shell or --pdb")
    if stage != "batch" and not (shell or with_pdb):
        raise ValueError(f"--at {stage} says where to stop: add --shell or --pdb")
    opened = open_record(record)
    num_ranks = opened.header.world_size
    if rank >= num_ranks:
        raise ValueError(f"--rank {rank}: the record has ranks 0 to {num_ranks - 1}")
    step_range(opened, step, step)
    check_steps_present(opened, step, step)
    check_anchor(opened, step)
    check_model(opened, model or opened.header.config["actor"]["path"], step)
    do = "shell" if shell else "pdb" if with_pdb else ""
    options = GotoOptions(stage, do, rank, model, save, keep_going, as_json)
    report = run_attached(["goto", record, str(step), json.dumps(asdict(options))], num_ranks)
    if as_json:
        print_json(report)
    raise SystemExit(0 if report["faithful"] else 1)


def run_attached(arguments: list[str], num_ranks: int) -> dict[str, object]:
    """The report of a task of `replay_rank` on ranks that have this terminal. Ends the command with their exit code when they fail."""
    import os

    from areal_core.environment import DETERMINISTIC
    from areal_core.launch.processes import thread_limits
    from areal_core.launch.ranks import RANK_LOGS
    from areal_debug.report_file import REPORT_FILE, read_report

    agent = ["-m", "areal_core.launch.ranks", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *(agent if num_ranks > 1 else []), "-m", "areal_debug.replay_rank", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        environment = DETERMINISTIC | {REPORT_FILE: str(report), RANK_LOGS: folder}
        process = subprocess.Popen(command, env=os.environ | thread_limits(1) | environment)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the shell
        code = process.wait()
        signal.signal(signal.SIGINT, before)
        if code != 0 or not report.exists():
            fail(
                f"the replay ended with exit code {code} before it was there; what it said stands above",
                code or 1,
            )
        return read_report(report)
