"""Statements of the documents, compared with the repository."""

import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from areal_debug.cli import VERBS, main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = (ROOT / "docs/verbs/index.md").read_text()


def code_blocks(text: str) -> str:
    return "\n".join(re.findall(r"```\n(.*?)```", text, re.DOTALL))


def test_the_commands_by_task_show_every_verb_and_no_other():
    shown = set(re.findall(r"areal-debug ([a-z-]+)", code_blocks(COMMANDS)))
    assert shown <= set(VERBS)
    assert set(VERBS) - shown == {"demo"}  # which `make demo` runs


def test_the_readme_begins_with_symptoms_and_fits():
    lines = README.splitlines()
    symptoms = re.findall(r"^\| \[.+\]\((.+)\) \| `areal-debug ([a-z]+)", "\n".join(lines[:14]), re.MULTILINE)
    assert len(symptoms) == 6
    assert {verb for _, verb in symptoms} <= set(VERBS)
    assert len(lines) <= 120
    assert README.count("](") <= 20
    assert [line for line in lines if len(line) > 100] == []


def anchors_in(text: str) -> set[str]:
    """Anchors of the headings, as GitHub names them."""
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_relative_link_leads_to_a_file_and_a_heading_of_a_checkout():
    links = re.compile(r"(?<=\]\()(?!\w+:|/)([^)#\s]*)#?([^)\s]*)(?=\))")
    tracked = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    dead = []
    for name in tracked.stdout.split():
        here = ROOT / name
        for path, anchor in links.findall(here.read_text()):
            file = here.parent / path if path else here
            if not file.exists() or (anchor and anchor not in anchors_in(file.read_text())):
                dead.append((name, path, anchor))
    assert dead == []


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
    done = CliRunner().invoke(main, [verb, "--help"], prog_name="areal-debug")
    assert done.exit_code == 0
    assert f"areal-debug {verb}" in done.stdout
    assert len(done.stdout.splitlines()) > 5


def test_the_command_lists_all_verbs():
    assert main.list_commands(None) == list(VERBS)
