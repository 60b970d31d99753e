"""Statements of the documents, compared with the repository."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from areal_debug.cli import VERBS, main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def code_blocks(text: str) -> str:
    return "\n".join(re.findall(r"```\n(.*?)```", text, re.DOTALL))


def test_readme_shows_every_verb_and_no_other():
    shown = set(re.findall(r"areal-debug ([a-z-]+)", code_blocks(README)))
    assert shown <= set(VERBS)
    assert set(VERBS) - shown == {"demo"}  # which `make demo` runs


def test_readme_tree_lists_what_exists_and_every_folder_of_ours():
    tree = code_blocks(README.split("## What is where")[1])
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
