"""`areal-debug replay`: run a record again without an inference engine, and compare every bit."""

import tempfile
from pathlib import Path
from typing import Any

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
    from recorder import open_record
    from replayer.before import check_model, check_ranks, step_range

    opened = open_record(record)
    first, last = step_range(opened, from_step, to_step)
    check_ranks(opened, nproc or opened.header.num_ranks)
    check_model(opened, model or opened.header.config["actor"]["path"], first)
    refuse_damage(record, len(opened.steps))
    if opened.uncommitted and not as_json:
        steps = ", ".join(map(str, opened.uncommitted))
        console(stderr=True).print(
            f"[yellow]not finished when the run ended, left out: step {steps}[/yellow]"
        )
    code, found = run_replay(record, opened.header.num_ranks, first, last, model, quiet=as_json)
    if found is None:
        fail(f"the replay ended with exit code {code} before its last step; what it said stands above", code)
    if as_json:
        print_json(found)
    raise SystemExit(code)


def run_replay(
    record: Path, num_ranks: int, first: int, last: int, model: str | None = None, quiet: bool = False
) -> tuple[int, dict[str, Any] | None]:
    """Replay on ranks of this machine, which print what they find unless `quiet`.

    Returns:
        0 and the report if every bit is the recorded one, 1 and the report if not; the ranks' exit code and None if they failed.
    """
    from areal_core.environment import DETERMINISTIC
    from areal_core.launch.torchrun import run_ranks
    from areal_debug.report_file import QUIET, REPORT_FILE, read_report

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        code = run_ranks(
            ["-m", "areal_debug.replay_rank", str(record), str(first), str(last), model or ""],
            num_ranks,
            DETERMINISTIC | {REPORT_FILE: str(report)} | ({QUIET: "1"} if quiet else {}),
            Path(folder),
        )
        if code != 0 or not report.exists():
            return code or 1, None
        found = read_report(report)
    return (0 if found["identical"] else 1), found


def refuse_damage(record: Path, num_steps: int) -> None:
    """End with code 1, naming the first damaged files and tensors, if any byte is not the one written."""
    from replayer.before import verify_bytes

    problems = with_progress("checking bytes", num_steps, lambda tick: verify_bytes(record, tick))
    if problems:
        named = "; ".join(str(problem) for problem in problems[:5])
        fail(f"the record is damaged: {named}", code=1)
