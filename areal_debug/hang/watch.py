"""`areal-debug hang watch`: watch a job and diagnose a hang before anything kills it."""

import json
import sys
import time
from pathlib import Path

import click

from areal_core.safety.durable import commit_file
from areal_debug.cli import USUAL_UMASK, Verb, json_option, output_option
from areal_debug.render import is_quiet
from areal_debug.waiting import leave_terminal
from hangdoctor.model import Diagnosis


@click.command(
    cls=Verb,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Watch a job and diagnose a hang before anything kills it",
    example="areal-debug hang watch --then kill -- torchrun --nproc-per-node 8 train.py",
)
@click.argument("job", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--pid", "pids", type=int, multiple=True, help="Watch this launcher or these ranks in place of JOB."
)
@output_option("Folder that gets one post-mortem per hang; by default hang-watch-TIME.")
@click.option(
    "--silence",
    "silence_s",
    type=float,
    metavar="SECONDS",
    help="Silence that is suspicious; by default estimated from the job's rhythm.",
)
@click.option(
    "--watchdog",
    "watchdog_s",
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Time after which NCCL or the scheduler kills the job.",
)
@click.option("--poll", "poll_s", default=2.0, show_default=True, help="Seconds between two polls.")
@click.option(
    "--then",
    type=click.Choice(["notify", "kill"]),
    default="notify",
    show_default=True,
    help="Action after a hang was diagnosed.",
)
@json_option
def watch(
    job: tuple[str, ...],
    pids: tuple[int, ...],
    output: Path | None,
    silence_s: float | None,
    watchdog_s: float,
    poll_s: float,
    then: str,
    as_json: bool,
) -> None:
    """Watch JOB (a command after --, which becomes our child, so no privilege is needed) or --pid.

    A job is silent when no heartbeat, log or CPU time moves; then its stacks decide between slow
    and stuck. Heartbeats: `from hangdoctor.heartbeat import beat; beat(step)` once per step, in any
    trainer. With --json every diagnosis is one line of JSON on standard output. Exit code: the
    job's, or 1 for a hang.
    """
    from hangdoctor.watch.liveness import Limits
    from hangdoctor.watch.loop import Plan, lives, watch_command, watch_pids

    if bool(job) == bool(pids):
        raise click.UsageError("Give either a command after -- or --pid.")
    if job and job[0].startswith("-"):
        raise click.UsageError(f"{job[0]} is no option of hang watch. The command of the job comes after --.")
    for pid in pids:
        if not lives(pid):
            raise click.UsageError(f"--pid {pid}: no process has this id.")
    folder = output or Path(time.strftime("hang-watch-%Y%m%d-%H%M%S"))

    def diagnose(place: Path) -> Diagnosis:
        diagnosis = post_mortem(place)
        if as_json:
            click.echo(json.dumps({"folder": str(place), **diagnosis.as_json()}))
        elif is_quiet():
            report(f"{diagnosis.label}: {diagnosis.summary} Post-mortem: {place}")
        return diagnosis

    umask = click.get_current_context().meta.get(USUAL_UMASK, -1)
    plan = Plan(folder, Limits(silence_s, watchdog_s), poll_s, then, umask)  # type: ignore[arg-type]
    leave_terminal()  # to the job
    notify = (lambda text: None) if is_quiet() else report
    if job:
        code = watch_command(list(job), plan, diagnose, notify)
        sys.exit(code if code >= 0 else 128 - code)  # as a shell shows a signal
    sys.exit(watch_pids(pids, plan, diagnose, notify))


def report(text: str) -> None:
    """Print one line of the watch on standard error, next to the job's own output."""
    click.echo(f"hang watch: {text}", err=True)


def post_mortem(folder: Path) -> Diagnosis:
    """Diagnose a collection and write the page and the JSON next to it."""
    import json

    from areal_debug.hang.render import write_post_mortem
    from hangdoctor.diagnose import diagnose
    from hangdoctor.parse.read import read_snapshot

    snapshot = read_snapshot([folder])
    diagnosis = diagnose(snapshot)
    write_post_mortem(diagnosis, snapshot, folder)
    commit_file(folder / "diagnosis.json", json.dumps(diagnosis.as_json(), indent=1) + "\n")
    return diagnosis
