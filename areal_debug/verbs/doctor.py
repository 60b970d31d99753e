"""`areal-debug doctor`: diagnose a run's metrics and recommend config changes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_debug.cli import Verb, force_option, json_option, output_option
from areal_debug.confined import ANYWHERE, reads_untrusted
from areal_debug.render import announce, console, end_if_damaged, fail, note, refuse_existing
from areal_debug.waiting import leave_terminal

if TYPE_CHECKING:
    from areal_debug.doctor.hooks import Hooks


# Options that say what an alarm does during a run.
HOOKS = {
    "--on-alarm": ("COMMAND", "Shell command for each alarm; gets AREAL_DEBUG_ALARM_ID, _TITLE, _STEP."),
    "--stop-on": ("FINDINGS", "Findings that stop the run: ids as D17, error, warning, all."),
}


def hook_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, (metavar, text) in reversed(HOOKS.items()):
        command = click.option(name, metavar=metavar, default="", help=text)(command)
    return command


@click.command(
    cls=Verb,
    example="areal-debug doctor runs/logs -o report.html\nareal-debug doctor runs/logs --follow --on-alarm 'echo $AREAL_DEBUG_ALARM_TITLE'",
)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--run", "name", metavar="NAME", help="Which run, where RUN holds several.")
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="QUANTITY=NAME",
    help="Name under which this run logs a quantity, as reward=my_env/return; may be repeated.",
)
@output_option("Also write an HTML page with plots.")
@force_option
@click.option("--follow", "follows", is_flag=True, help="Look again during the run; print each alarm once.")
@click.option(
    "--every", "every_s", default=10.0, show_default=True, help="With --follow: seconds between looks."
)
@click.option("--idle", "idle_s", type=float, help="With --follow: end after seconds without a new value.")
@click.option("--pid", type=int, help="With --follow: the run's launcher; following ends with it.")
@hook_options
@json_option
def command(
    run: Path,
    name: str | None,
    metrics: tuple[str, ...],
    output: Path | None,
    force: bool,
    follows: bool,
    every_s: float,
    idle_s: float | None,
    pid: int | None,
    on_alarm: str,
    stop_on: str,
    as_json: bool,
) -> None:
    """Diagnose the metrics of RUN, a record, folder or file.

    Files: stats.jsonl, trainer_state.json, TensorBoard events, Weights & Biases (.wandb of offline
    runs, exports as CSV or JSON), Trackio (.db, .parquet), MLflow, JSON lines as of verl's file logger, and
    what frameworks print (.log, .out, .txt). Names of metrics: of AReaL, miles, NeMo-RL, OpenRLHF,
    prime-rl, SkyRL, slime, TRL, verl, and others that end alike.

    Exit code 0: nothing is wrong. 1: a problem was found. 2: there are no metrics to judge.
    """
    from areal_debug.doctor.hooks import NO_HOOKS, make_hooks
    from areal_debug.doctor.rows import is_record
    from hangdoctor.watch.loop import lives

    hooks = make_hooks(on_alarm, stop_on)
    if output is not None:
        refuse_existing(output, force)
        if not output.parent.is_dir():
            fail(f"{output.parent} is not a folder: give --output a file in an existing folder")
    given = dict(split_metric(metric) for metric in metrics)
    if follows:
        if stop_on and pid is None:
            fail("--stop-on needs --pid, the process that launched the run")
        if pid is not None and not lives(pid):
            fail(f"--pid {pid}: no process has this id; without --follow the log is judged as it is")
        raise SystemExit(follow_run(run, name, given, every_s, idle_s, pid, hooks, as_json))
    if hooks != NO_HOOKS or pid is not None or idle_s is not None:
        fail("--on-alarm, --stop-on, --pid and --idle go with --follow")
    judge = judge_record if is_record(run) else judge_run
    judge(run=run, name=name, given=given, output=output, as_json=as_json)


def split_metric(text: str) -> tuple[str, str]:
    """Return quantity and name of QUANTITY=NAME. Raises ValueError."""
    quantity, separator, name = text.partition("=")
    if not (quantity and separator and name):
        raise ValueError(f"--metric {text!r} is not QUANTITY=NAME, as in reward=my_env/return")
    return quantity, name


def judge_run(run: Path, name: str | None, given: dict[str, str], output: Path | None, as_json: bool) -> None:
    from areal_debug.doctor.examine import EXIT_CODES, document, examine, verdict
    from areal_debug.doctor.read import read_run
    from areal_debug.doctor.report import report_of
    from areal_debug.report.frame import Frame
    from areal_debug.report.page import write_report
    from areal_debug.report.terminal import print_answer

    announce(f"reading the metrics of {run}")
    read = read_run(run, name, given)
    found = examine(read)
    if output is not None:
        report = report_of(read, found)
        write_report(output, report, Frame(report.verdict, read.source, "doctor", verdict(read, found)))
    print_answer(document(read, found), report_of(read, found), as_json)
    end_if_damaged(read.damage.found)
    raise SystemExit(EXIT_CODES[verdict(read, found)])


def follow_run(
    run: Path,
    name: str | None,
    given: dict[str, str],
    every_s: float,
    idle_s: float | None,
    pid: int | None,
    hooks: "Hooks",
    as_json: bool,
) -> int:
    import json

    from areal_debug.doctor.follow import Follower, follow
    from areal_debug.doctor.report import alarm_lines
    from recorder.documents import plain

    out = console()

    def report(alarm: Mapping[str, Any]) -> None:
        if as_json:
            click.echo(json.dumps(plain(alarm), allow_nan=False, default=str))
        else:
            out.print(*alarm_lines(alarm), sep="\n")

    leave_terminal()  # it waits for the run
    follower = Follower(*(run, report, note, hooks), run=name, given=given, pid=pid, every_s=every_s)
    return follow(follower, idle_s)


judge_record = reads_untrusted("run", outputs="output", reads=ANYWHERE)(judge_run)
