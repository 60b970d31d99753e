"""`areal-debug info`: what is installed and works here, the options of a run, and skills."""

import shutil
from dataclasses import asdict
from pathlib import Path

import click

from areal_debug.cli import Verb, VerbGroup, force_option, json_option
from areal_debug.installation import EXAMPLES
from areal_debug.render import console, print_json, refuse_existing, styled
from areal_debug.skills import FOLDER, shipped_skills

KINDS = ("grpo", "ppo", "sft", "rw", "dpo")
to_option = click.option(
    "--to", "folder", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
    help="Copy them into this folder, and print none.",
)  # fmt: skip


@click.group(
    cls=VerbGroup,
    invoke_without_command=True,
    example="areal-debug info\nareal-debug info options actor.optimizer\nareal-debug info skills --to .claude/skills",
)
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List versions, devices, engines, schedulers and permissions, and which verbs work here.

    Nothing is imported, nothing is changed, and credentials are left out: the
    output can be part of a bug report.

    Exit code 0: what is installed fits together. 1: something is broken.
    """
    if ctx.invoked_subcommand is not None:
        return
    from areal_debug.info.report import report_of
    from areal_debug.info.summary import collect_info
    from areal_debug.report.terminal import answer

    info = collect_info()
    answer(asdict(info), report_of(info), as_json)


@command.command(
    cls=Verb,
    short_help="List the options of a run: type, default, limits and help",
    example="areal-debug info options actor.optimizer\nareal-debug info options temperature --kind grpo",
)
@click.argument("search", metavar="[SECTION|SEARCH]", required=False, default="")
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="grpo",
    show_default=True,
    help="Method whose options to list.",
)
@json_option
def options(search: str, kind: str, as_json: bool) -> None:
    """List options with their type, default, limits and help.

    SECTION, as actor.optimizer, lists the options below it. SEARCH lists those with the words in
    their name or help. Without either, all are listed.
    """
    from areal_debug.info.options import KINDS as CLASSES
    from areal_debug.info.options import options_of, print_options, select

    found = select(list(options_of(CLASSES[kind])), search)
    if as_json:
        print_json({"kind": kind, "options": [asdict(option) for option in found]})
    else:
        print_options(console(), found)


@command.command(
    cls=Verb,
    short_help="List, print or copy instructions for coding assistants",
    example="areal-debug info skills\n"
    "areal-debug info skills rl-run-hangs\n"
    "areal-debug info skills --to .claude/skills",
)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@to_option
@force_option
@json_option
def skills(names: tuple[str, ...], folder: Path | None, force: bool, as_json: bool) -> None:
    """List the skills, print those that are named, or copy them to where an assistant reads them.

    A skill leads a coding assistant from one symptom of a run, such as a hang, to a verdict by the
    commands of areal-debug. Any assistant that reads folders with a SKILL.md can use them.
    """
    found = {skill.name: skill for skill in shipped_skills()}
    if unknown := [name for name in names if name not in found]:
        raise ValueError(f"there is no skill {unknown[0]!r}: choose from {', '.join(found)}")
    chosen = [found[name] for name in names or found]
    if folder is not None:
        for skill in chosen:
            refuse_existing(folder / skill.name, force)
        for skill in chosen:
            shutil.copytree(FOLDER / skill.name, folder / skill.name, dirs_exist_ok=True)
    if as_json:
        print_json({"skills": [asdict(skill) for skill in chosen], "to": folder})
    elif folder is not None:
        console().print(styled("{} skills copied to {}", len(chosen), folder))
    elif names:
        click.echo("\n".join(skill.text for skill in chosen), nl=False)
    else:
        width = max(map(len, found))
        for skill in chosen:
            console().print(styled(f"[bold]{{:<{width}}}[/bold]  {{}}", skill.name, skill.description))


@command.command(
    cls=Verb, short_help="Copy the examples that the pages name", example="areal-debug info examples"
)
@to_option
@force_option
@json_option
def examples(folder: Path | None, force: bool, as_json: bool) -> None:
    """Copy the example scripts, YAML files and data that the pages name; by default to ./examples."""
    refuse_existing(target := folder or Path("examples"), force)
    shutil.copytree(EXAMPLES, target, ignore=shutil.ignore_patterns("__*"), dirs_exist_ok=True)
    if as_json:
        print_json({"to": target})
    else:
        console().print(styled("examples copied to {}", target))
