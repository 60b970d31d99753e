"""`areal-debug info`: what is installed, what this machine has, and which verbs work here."""

from dataclasses import asdict

import click

from areal_debug.cli import VerbGroup, json_option
from areal_debug.render import console, errors_as_sentences, print_json, with_progress


@click.group(
    cls=VerbGroup,
    invoke_without_command=True,
    example="areal-debug info\nareal-debug info --check\nareal-debug info skills --to .claude/skills",
    lazy={"skills": "info.skills:skills"},
)
@click.option("--check", is_flag=True, help="Import each installed package, too; takes up to some minutes.")
@json_option
@click.pass_context
@errors_as_sentences
def command(ctx: click.Context, check: bool, as_json: bool) -> None:
    """List versions, devices, engines, schedulers and permissions, and which verbs work here.

    Nothing is imported without --check, nothing is changed, and credentials are left out: the
    output can be part of a bug report.

    Exit code 0: what is installed fits together. 1: something is broken.
    """
    if ctx.invoked_subcommand is not None:
        if check:
            raise click.UsageError(f"--check imports packages: leave out {ctx.invoked_subcommand}.")
        return
    from areal_debug.info.packages import import_errors, importable
    from areal_debug.info.render import print_info
    from areal_debug.info.summary import collect_info

    errors = with_progress("importing packages", len(importable()), import_errors) if check else []
    info = collect_info(errors)
    if as_json:
        print_json(asdict(info))
    else:
        print_info(console(), info)
    raise SystemExit(1 if info.problems else 0)
