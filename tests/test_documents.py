"""Statements of the documents, compared with the repository."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from areal_debug.cli import VERBS, main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = (ROOT / "docs/commands.md").read_text()


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
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.M
    )
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_relative_link_leads_to_a_file_of_a_checkout():
    links = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)")
    tracked = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    dead = [
        (name, link)
        for name in tracked.stdout.split()
        for link in links.findall((ROOT / name).read_text())
        if not (ROOT / name).parent.joinpath(link).exists()
    ]
    assert dead == []


# Documents that are not pages of the site, whose links the build of the site checks.
@pytest.mark.parametrize(
    "name", ["README.md", "CODE_OF_CONDUCT.md", ".github/PULL_REQUEST_TEMPLATE.md", "tests/records/README.md"]
)
def test_links_of_a_document_lead_to_files_and_headings(name):
    here = ROOT / name
    links = re.findall(r"\]\((?!https://)([^)]+)\)", here.read_text())
    dead = []
    for link in links:
        path, _, anchor = link.partition("#")
        file = here.parent / path if path else here
        if not file.exists() or (anchor and anchor not in anchors_in(file.read_text())):
            dead.append(link)
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
