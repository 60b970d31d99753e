"""`areal-debug hang watch`: run a job, or stand beside one, and say why it hangs before anything kills it."""

import sys
import time
from pathlib import Path

import click

from hangdoctor.model import Diagnosis


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("job", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--pid", "pids", type=int, multiple=True, help="Watch this launcher or these ranks; no COMMAND then."
)
@click.option(
    "--to", type=click.Path(path_type=Path), help="Where post-mortems go.  [default: hang-watch-TIME]"
)
@click.option(
    "--quiet", "quiet_s", type=float, help="Seconds of silence that are suspicious.  [default: learned]"
)
@click.option(
    "--watchdog",
    "watchdog_s",
    default=600.0,
    show_default=True,
    help="When NCCL or the scheduler kills the job.",
)
@click.option("--poll", "poll_s", default=2.0, show_default=True, help="Seconds between two looks.")
@click.option("--then", type=click.Choice(["notify", "kill", "restart"]), default="notify", show_default=True)
@click.option("--max-restarts", default=3, show_default=True)
@click.option(
    "--hook",
    default="",
    help="Shell command for a finding; sees HANGDOCTOR_LABEL, _CULPRITS, _SUMMARY, _FOLDER.",
)
def watch(
    job: tuple[str, ...],
    pids: tuple[int, ...],
    to: Path | None,
    quiet_s: float | None,
    watchdog_s: float,
    poll_s: float,
    then: str,
    max_restarts: int,
    hook: str,
) -> None:
    """Watch JOB (a command after --, which becomes our child, so no privilege is needed) or --pid.

    A job is silent when no heartbeat, log or CPU time moves; then its stacks decide between slow and stuck.
    Heartbeats: `from hangdoctor.heartbeat import beat; beat(step)` once a step, in any trainer.
    """
    from hangdoctor.watch.judge import Limits
    from hangdoctor.watch.loop import Plan, watch_command, watch_pids

    if bool(job) == bool(pids):
        raise click.UsageError("Give either a command after -- or --pid.")
    if pids and then == "restart":
        raise click.UsageError(
            "--then restart needs a command after --: what somebody else started is theirs to start."
        )
    folder = to or Path(time.strftime("hang-watch-%Y%m%d-%H%M%S"))
    plan = Plan(folder, Limits(quiet_s, watchdog_s), poll_s, then, hook, max_restarts)  # type: ignore[arg-type]
    if job:
        sys.exit(watch_command(list(job), plan, post_mortem, tell))
    sys.exit(watch_pids(pids, plan, post_mortem, tell))


def tell(text: str) -> None:
    """One line of the watch on stderr, beside the job's own output."""
    click.echo(f"hang watch: {text}", err=True)


def post_mortem(folder: Path) -> Diagnosis:
    """Diagnose a collection and lay the page and the JSON beside it."""
    import json

    from areal_debug.hang_render import write_post_mortem
    from hangdoctor.diagnose import diagnose
    from hangdoctor.parse.read import read_snapshot

    snapshot = read_snapshot((folder,), None, {})
    diagnosis = diagnose(snapshot)
    write_post_mortem(diagnosis, snapshot, folder)
    (folder / "diagnosis.json").write_text(json.dumps(diagnosis.as_json(), indent=1) + "\n")
    return diagnosis
