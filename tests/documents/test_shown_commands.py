"""Command lines and options that the documents show, parsed as the command line parses them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from areal_debug.cli import main
from areal_debug.info.options import KINDS, options_of

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "examples/**/*.md",
        "*/FORMAT.md",
        "*/COLLECTION.md",
        "areal_debug/skills/*/*.md",
    )
    for path in ROOT.glob(pattern)
)
BLOCK = re.compile(r"^ *```\w*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
LINE = re.compile(r"^ *(?:\$ )?(?:\w+=\S+ )*areal-debug (.+)$", re.MULTILINE)
END = re.compile(r"\|{1,2}|&&?|;|\d?[<>].*")
OPTIONS = {option.name for cls in KINDS.values() for option in options_of(cls)}
SECTIONS = "|".join({name.partition(".")[0] for name in OPTIONS if "." in name})
DOTTED = re.compile(rf"(?<![\w./-])(?:{SECTIONS})(?:\.[a-z_0-9]+)+(?![\w.*(/{{])")
# A document that names options of earlier versions.
OTHER_OPTIONS = {Path("CHANGELOG.md")}


def commands_in_blocks(text: str) -> list[str]:
    return LINE.findall("\n".join(BLOCK.findall(text)).replace("\\\n", " "))


def commands_in_sentences(text: str) -> Iterator[str]:
    """Commands in `code`; two commands that differ in a word are written `a|b`."""
    for code in re.findall(r"`([^`]+)`", BLOCK.sub("", text)):
        words = " ".join(code.split())
        if words.startswith("areal-debug ") and not re.search(r"\w\|\w|VERB", words):
            yield words.removeprefix("areal-debug ")


def mistake(command: str, is_complete: bool = True) -> str:
    """Return what the command line would refuse before a file is read, or nothing.

    A command in a sentence may leave out values and arguments.
    """
    words = shlex.split(command, comments=True)
    words = words[: next((n for n, word in enumerate(words) if END.fullmatch(word)), len(words))]
    verb: click.Command = main
    context = click.Context(main, info_name="areal-debug")
    try:
        while isinstance(verb, click.Group) and words and not words[0].startswith("-"):
            name, verb, _ = verb.resolve_command(context, words)
            context = verb.context_class(verb, context, info_name=name, **verb.context_settings)
            words = words[1:]
        values, left, _ = verb.make_parser(context).parse_args(words)
        for parameter in verb.params:
            value = values.get(parameter.name)
            if isinstance(parameter.type, click.Choice):
                for one in value if isinstance(value, list) else [value]:
                    if isinstance(one, str) and not one.isupper():
                        parameter.type.convert(one, parameter, context)
            is_missing = isinstance(parameter, click.Argument) and not isinstance(value, str | tuple)
            if is_complete and is_missing and parameter.required:
                return f"missing {parameter.human_readable_name}"
        return f"too many arguments: {left}" if left else ""
    except click.UsageError as error:
        is_cut = not is_complete and "requires an argument" in error.format_message()
        return "" if is_cut else error.format_message()


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_shown_commands_are_accepted(page: Path) -> None:
    text = (ROOT / page).read_text()
    found = {command: mistake(command) for command in commands_in_blocks(text)}
    found |= {command: mistake(command, is_complete=False) for command in commands_in_sentences(text)}
    assert {command: why for command, why in found.items() if why} == {}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OTHER_OPTIONS], ids=str)
def test_shown_options_exist(page: Path) -> None:
    codes = re.findall(r"`([^`]+)`", (ROOT / page).read_text())
    named = {name for code in codes for name in DOTTED.findall(code)}
    named = {name for name in named if name.rpartition(".")[2] not in ("py", "yaml", "md", "launch_server")}
    assert named - OPTIONS == set()
