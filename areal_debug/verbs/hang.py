"""`areal-debug hang`: find out why a job hangs and which ranks block it."""

import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from areal_debug.cli import Verb, VerbGroup, force_option, json_option, output_option, sample_option
from areal_debug.confined import reads_untrusted
from areal_debug.render import fail, print_json, refuse_existing

MAX_PASTED_BYTES = 256 << 20


def spools_standard_input(verb: Callable[..., None]) -> Callable[..., None]:
    """Decorate a verb with `paths`: `-` becomes a file with the text of standard input.

    The confined child that reads the paths has no standard input.
    """

    @functools.wraps(verb)
    def wrapped(paths: tuple[Path, ...], **kwargs: Any) -> None:
        if Path("-") not in paths:
            verb(paths=paths, **kwargs)
            return
        with tempfile.TemporaryDirectory() as folder:
            pasted = Path(folder, "standard_input")
            pasted.write_bytes(sys.stdin.buffer.read(MAX_PASTED_BYTES))
            verb(paths=tuple(pasted if path == Path("-") else path for path in paths), **kwargs)

    return wrapped


@click.group(
    cls=VerbGroup,
    invoke_without_command=True,
    example="areal-debug hang\nareal-debug hang --slow\nareal-debug hang watch -- python train.py",
    lazy={"collect": "hang.collect:collect", "watch": "hang.watch:watch"},
)
@click.option("--pid", "pids", type=int, multiple=True, help="A rank or a launcher; may be repeated.")
@click.option("--match", default="", help="Regular expression that the ranks' command lines match.")
@click.option("--slow", is_flag=True, help="Find which rank or engine of a running job is slow, and why.")
@click.option(
    "--seconds",
    type=click.FloatRange(1, 3600),
    help="Time that --slow looks at the job for, by default 15; some steps must fit into it.",
)
@sample_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    pids: tuple[int, ...],
    match: str,
    slow: bool,
    seconds: float | None,
    sample: bool,
    as_json: bool,
) -> None:
    """Find out why a job hangs and which ranks block it, or with --slow which rank slows it down.

    Without a command: collect the stacks of the ranks on this host (or of --pid) and diagnose them.

    Exit code 0: not hung, no rank slow. 1: a hang or a slow rank was found. 2: inconclusive.
    """
    if seconds is not None and not slow:
        raise click.UsageError("--seconds is the time of --slow: give both.")
    if ctx.invoked_subcommand is not None and slow:
        raise click.UsageError(f"--slow looks at a job that runs: leave out {ctx.invoked_subcommand}.")
    if sample:
        if pids or match or slow or ctx.invoked_subcommand is not None:
            raise click.UsageError("--sample shows the sample alone: leave out what selects a job.")
        from areal_debug.sample import unpacked

        ctx.invoke(diagnose, paths=(unpacked() / "hang",), as_json=as_json)
    from hangdoctor.collect.discover import Search

    if slow:
        from areal_debug.hang.slow import show_slow

        sys.exit(show_slow(Search(pids, match), seconds, as_json))
    if ctx.invoked_subcommand is None:
        from areal_debug.hang.collect import live

        sys.exit(live(Search(pids, match), as_json))


@command.command(
    cls=Verb,
    short_help="Classify a hang from saved stacks",
    example="areal-debug hang diagnose stacks.tar.gz -o hang.html",
)
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--world-size", type=int, help="Number of trainer ranks that the job should have.")
@output_option("Also write the report as one HTML page, with every stack.")
@force_option
@json_option
@spools_standard_input
@reads_untrusted("paths", outputs="output")
def diagnose(
    paths: tuple[Path, ...],
    world_size: int | None,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Classify a hang from saved stacks: folders, tars or files of any format; - is standard input.

    What people paste is read as well: frames without headings, several ranks in one text (`rank
    0-3:`, `idle: rank 2`), watchdog messages of a log. A rank without a stack is not called missing
    unless the input shows that its process was looked for.

    Exit code 0: not hung. 1: a hang was found. 2: inconclusive.
    """
    from areal_debug.hang.render import show_diagnosis
    from hangdoctor.diagnose import diagnose as diagnose_snapshot
    from hangdoctor.parse.read import read_snapshot

    refuse_existing(output, force)
    try:
        snapshot = read_snapshot(paths, world_size)
    except OSError as error:
        fail(str(error))
    sys.exit(show_diagnosis(diagnose_snapshot(snapshot), snapshot, as_json, output))


@command.command(
    cls=Verb,
    short_help="Explain the pattern behind a label, or list all labels",
    example="areal-debug hang explain straggler_or_not_hung",
)
@click.argument("label", required=False)
@json_option
def explain(label: str | None, as_json: bool) -> None:
    """Explain the pattern behind a LABEL of a diagnosis; without one, list all labels."""
    from hangdoctor.rules.order import explain as lesson
    from hangdoctor.rules.order import labels

    text = lesson(label)
    if not as_json:
        click.echo(text)
    elif label is None:
        print_json({"labels": labels()})
    else:
        print_json({"label": label, "explanation": text})
