"""`areal-debug info skills`: instructions for coding assistants, one for each symptom of a run.

A skill is a folder with a `SKILL.md`: YAML front matter with name and description, then steps.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import yaml

from areal_debug.cli import Verb, force_option, json_option
from areal_debug.render import console, errors_as_sentences, print_json, refuse_existing, styled

FOLDER = Path(__file__).parents[1] / "skills"


@dataclass(frozen=True)
class Skill:
    """A skill: its name, when to use it, and its text with front matter."""

    name: str
    description: str
    text: str


def shipped_skills() -> list[Skill]:
    return [parse_skill(file.read_text()) for file in sorted(FOLDER.glob("*/SKILL.md"))]


def parse_skill(text: str) -> Skill:
    _, front, _ = text.split("---\n", 2)
    facts = yaml.safe_load(front)
    return Skill(facts["name"], facts["description"], text)


@click.command(
    cls=Verb,
    short_help="List, print or copy instructions for coding assistants",
    example="areal-debug info skills\n"
    "areal-debug info skills rl-run-hangs\n"
    "areal-debug info skills --to .claude/skills",
)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--to", "folder", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
    help="Copy the skills into this folder, such as .claude/skills, and not print them.",
)  # fmt: skip
@force_option
@json_option
@errors_as_sentences
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
        copy_skills(chosen, folder, force)
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


def copy_skills(chosen: list[Skill], folder: Path, force: bool) -> None:
    for skill in chosen:
        refuse_existing(folder / skill.name, force)
    for skill in chosen:
        shutil.copytree(FOLDER / skill.name, folder / skill.name, dirs_exist_ok=True)
