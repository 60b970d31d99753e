"""Statements of the documents, compared with the repository."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from areal_debug.cli import VERBS, main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = (ROOT / "docs/commands.md").read_text()
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "areal_debug/skills/*/*.md")
    for path in ROOT.glob(pattern)
)


def code_blocks(text: str) -> str:
    return "\n".join(re.findall(r"```\n(.*?)```", text, re.DOTALL))


def test_the_commands_by_task_show_every_verb_and_no_other():
    shown = set(re.findall(r"areal-debug ([a-z-]+)", code_blocks(COMMANDS)))
    assert shown <= set(VERBS)
    assert set(VERBS) - shown == {"demo"}  # which `make demo` runs


def test_the_readme_names_every_verb_in_few_words_and_fits():
    rows = re.findall(r"^\| `([a-z-]+)` \| (.+) \|$", README, re.MULTILINE)
    assert [name for name, _ in rows] == list(VERBS)
    assert [purpose for _, purpose in rows if len(purpose.split()) > 6] == []
    lines = README.splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 100] == []


def test_links_of_the_readme_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)", README)
    local = [link for link in links if not link.startswith("https://")]
    assert len(local) > 40
    assert [link for link in local if not (ROOT / link).exists()] == []


def commands_of(text: str) -> list[str]:
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    code = "\n".join(blocks).replace("\\\n", " ")
    return re.findall(r"^ *(?:\$ )?areal-debug (.+)$", code, re.MULTILINE)


def unknown_words(command: str) -> list[str]:
    """Options of a command line that its verb does not have, or a word in place of a verb."""
    words = shlex.split(command, comments=True)
    end = next((n for n, word in enumerate(words) if word in ("|", ">", "<", "&", "--")), len(words))
    words = words[:end]
    verb: click.Command = main
    parents = [main]
    while isinstance(verb, click.Group) and words and words[0] in verb.list_commands(click.Context(verb)):
        verb = verb.get_command(click.Context(verb), words.pop(0))
        parents.append(verb)
    if isinstance(verb, click.Group) and words and not words[0].startswith("-"):
        return words[:1]
    known = {name for parent in parents for parameter in parent.params for name in parameter.opts}
    known |= {"-h", "--help"}
    known |= {"--config", "--dry-run"} if command.split()[0] in ("train", "eval") else set()
    return [
        word
        for word in words
        if word.startswith("-") and word not in known and not re.fullmatch(r"-[\d.]*", word)
    ]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_that_are_shown_exist(page):
    found = {command: unknown_words(command) for command in commands_of((ROOT / page).read_text())}
    assert {command: words for command, words in found.items() if words} == {}


def test_an_unknown_command_would_be_found():
    assert unknown_words("hang colect --to x") == ["colect"]
    assert unknown_words("hang collect --into x") == ["--into"]


def test_the_tree_lists_what_exists_and_every_folder_of_ours():
    tree = code_blocks((ROOT / "docs/layout.md").read_text())
    parents: list[str] = []
    listed = set()
    for line in tree.strip().splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0].rstrip("/")
        parents = [*parents[:depth], name]
        listed.add("/".join(parents))
    assert [path for path in sorted(listed) if not (ROOT / path).exists()] == []
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {
        path.split("/")[0] for path in tracked.splitlines() if "/" in path and not path.startswith(".")
    }
    assert folders - {"docs"} <= listed


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb):
    done = subprocess.run(
        [str(Path(sys.executable).parent / "areal-debug"), verb, "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"areal-debug {verb}" in done.stdout
    assert len(done.stdout.splitlines()) > 5


def test_the_command_lists_all_verbs():
    assert main.list_commands(None) == list(VERBS)
