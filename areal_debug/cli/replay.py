"""`areal-debug replay`: run a record again without an inference engine, and compare every bit."""

import sys
import tempfile
from pathlib import Path

import click

from areal_debug.render import console, errors_as_sentences, fail, print_json, with_progress


@click.command()
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--from-step", type=int, help="First step to report; earlier ones are run if no anchor is nearer."
)
@click.option("--to-step", type=int, help="Last step to run.")
@click.option("--nproc", type=int, help="Ranks; must be as many as recorded.")
@click.option("--model", type=click.Path(), help="Where the model that the run started from lies now.")
@click.option("--json", "as_json", is_flag=True, help="The same facts as JSON.")
@errors_as_sentences
def command(
    record: Path,
    from_step: int | None,
    to_step: int | None,
    nproc: int | None,
    model: str | None,
    as_json: bool,
) -> None:
    """Train again on the batches of RECORD and compare every loss, gradient norm and parameter, bit by bit."""
    from areal_core.environment import DETERMINISTIC
    from areal_core.launch.torchrun import run_ranks
    from areal_debug.report_file import QUIET, REPORT_FILE, read_report
    from recorder import open_record
    from replayer.before import check_model, check_ranks, step_range

    opened = open_record(record)
    first, last = step_range(opened, from_step, to_step)
    check_ranks(opened, nproc or opened.header.num_ranks)
    check_model(opened, model or opened.header.config["actor"]["path"])
    refuse_damage(record, len(opened.steps))
    if opened.uncommitted and not as_json:
        steps = ", ".join(map(str, opened.uncommitted))
        console(stderr=True).print(
            f"[yellow]not finished when the run ended, left out: step {steps}[/yellow]"
        )
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        code = run_ranks(
            ["-m", "areal_debug.replay_rank", str(record), str(first), str(last), model or ""],
            opened.header.num_ranks,
            DETERMINISTIC | {REPORT_FILE: str(report)} | ({QUIET: "1"} if as_json else {}),
            Path(folder),
        )
        if code != 0:
            fail(
                f"the replay ended with exit code {code} before its last step; what it said stands above",
                code,
            )
        found = read_report(report)
    if as_json:
        print_json(found)
    sys.exit(0 if found["identical"] else 1)


def refuse_damage(record: Path, num_steps: int) -> None:
    """End with code 1, naming the first damaged files and tensors, if any byte is not the one written."""
    from replayer.before import verify_bytes

    problems = with_progress("checking bytes", num_steps, lambda tick: verify_bytes(record, tick))
    if problems:
        named = "; ".join(str(problem) for problem in problems[:5])
        fail(f"the record is damaged: {named}", code=1)
