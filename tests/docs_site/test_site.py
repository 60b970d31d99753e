"""The documentation site: it builds offline without a warning, and has a page for each verb."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from areal_debug.cli import VERBS

ROOT = Path(__file__).parents[2]
VERB_PAGES = ROOT / "docs/verbs"
OFFLINE = "import socket\ndef refuse(*_, **__): raise OSError('no network')\nsocket.socket.connect = refuse\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; every warning (a dead link, a page without a place) is an error."""
    folder = tmp_path_factory.mktemp("site")
    program = f"{OFFLINE}from mkdocs.__main__ import cli\ncli()"
    done = subprocess.run(
        [sys.executable, "-c", program, "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_verb_has_a_page_with_its_name_in_a_heading_and_no_other() -> None:
    listed = dict(re.findall(r"^\| \[(\w+)\]\(([^)#]+)", (VERB_PAGES / "index.md").read_text(), re.MULTILINE))
    assert set(listed) == set(VERBS)
    for verb, page in listed.items():
        assert re.search(rf"^#.* `areal-debug {verb}`", (VERB_PAGES / page).read_text(), re.MULTILINE), verb
    assert {page.name for page in VERB_PAGES.glob("*.md")} - {"index.md"} <= set(listed.values())


@pytest.mark.long
def test_pages_of_the_site_are_reachable_from_its_navigation(site: Path) -> None:
    home = (site / "index.html").read_text()
    built = {str(page.relative_to(site)) for page in site.rglob("*.html")}
    listed = set(re.findall(r'href="([^"#:]+\.html)"', home))
    assert {page for page in built if not page.startswith("source/")} - listed == {"404.html"}
