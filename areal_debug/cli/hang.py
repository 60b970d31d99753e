"""`areal-debug hang`: from a job that stands still to the ranks that hold it up."""

import importlib
import sys
from pathlib import Path
from typing import Any

import click

# Verbs that look at live processes; each names its file and the click command in it.
LIVE = {"collect": ("hang_collect", "collect"), "watch": ("hang_watch", "watch")}


class HangGroup(click.Group):
    """Imports the collecting and watching verbs only when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *LIVE]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in LIVE:
            return super().get_command(ctx, cmd_name)
        module, attribute = LIVE[cmd_name]
        return getattr(importlib.import_module(f"areal_debug.cli.{module}"), attribute)


@click.group(cls=HangGroup, invoke_without_command=True)
@click.option(
    "--pid", "pids", type=int, multiple=True, help="A rank or a launcher; may be given several times."
)
@click.option("--json", "as_json", is_flag=True, help="Print the diagnosis as one JSON object.")
@click.pass_context
def command(ctx: click.Context, pids: tuple[int, ...], as_json: bool) -> None:
    """Say why a job stands still and which ranks hold it up.

    Without a verb: collect the stacks of the ranks that run here (or of --pid), diagnose, and say so.
    """
    if ctx.invoked_subcommand is None:
        from areal_debug.cli.hang_collect import live

        sys.exit(live(pids, as_json))


@command.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--world-size", type=int, help="How many trainer ranks the job should have.")
@click.option("--mapping", type=click.Path(path_type=Path, dir_okay=False), help="Lines of FILE RANK.")
@click.option("--json", "as_json", is_flag=True, help="Print the diagnosis as one JSON object.")
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a post-mortem page here."
)
@click.option(
    "--markdown", type=click.Path(path_type=Path, dir_okay=False), help="Write text for an issue here."
)
def diagnose(paths: tuple[Path, ...], world_size: int | None, mapping: Path | None, **show: Any) -> None:
    """Name the class of a hang from saved stacks: folders, tars or files of any format.

    Exit status: 0 not hung, 1 hang found, 2 could not tell.
    """
    from areal_debug.hang_render import show_diagnosis
    from hangdoctor.diagnose import diagnose as judge
    from hangdoctor.errors import HangInputError
    from hangdoctor.parse.read import parse_mapping, read_snapshot

    try:
        names = parse_mapping(mapping.read_text()) if mapping else {}
        snapshot = read_snapshot(paths, world_size, names)
    except (HangInputError, OSError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    sys.exit(show_diagnosis(judge(snapshot), snapshot, **show))


@command.command()
@click.argument("label", required=False)
def explain(label: str | None) -> None:
    """Teach the pattern behind a LABEL; without one, list them all."""
    from hangdoctor.errors import HangInputError
    from hangdoctor.explain import explain as lesson

    try:
        click.echo(lesson(label))
    except HangInputError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
