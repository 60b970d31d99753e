"""The documentation site: it builds offline without a warning, and has a page for each verb."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import click
import pytest

from areal_debug.cli import VERBS, main

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


class Loaded(HTMLParser):
    """Addresses that a browser loads with a page, without a click."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.addresses.append(named.get("src") or "")
        if tag == "link" and named.get("rel") not in ("canonical", "next", "prev"):
            self.addresses.append(named.get("href") or "")


def is_remote(address: str) -> bool:
    return re.match(r"(\w+:)?//", address) is not None


def verbs_below(command: click.Command, path: str) -> Iterator[tuple[str, str]]:
    """Yield verb and sub-verb of each command below a group."""
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            yield path, name


@pytest.mark.long  # `make docs` builds the site
def test_a_page_loads_nothing_from_a_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 100
    loaded = {page.name: Loaded(page.read_text()).addresses for page in pages}
    assert all(loaded.values())
    assert {name: remote for name, all_ in loaded.items() if (remote := [*filter(is_remote, all_)])} == {}
    styles = "".join(style.read_text() for style in site.rglob("*.css"))
    assert re.findall(r"(?:url|@import)\s*\(?[\"']?(?:https?:)?//", styles) == []


WORDS_OF_GUIDES = {
    "DebugConfig": "verbs/train", "dump_rollout_data": "verbs/train", "replay_rollout_data": "verbs/train",
    "enable_multimodal": "vision", "StatefulDataLoader": "recovery", "LocalScheduler": "launchers",
    "should_accept_fn": "custom_algorithms", "persistent server": "guides",
    "swallowed exceptions": "symptoms/hangs", "0 steps": "symptoms/hangs",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("query", WORDS_OF_GUIDES)
def test_the_words_of_areals_guides_lead_to_the_page_of_it(site: Path, query: str) -> None:
    """Their page is among the first, after a count of all words as the site's search has them."""
    found: dict[str, float] = {}
    for section in json.loads((site / "search/search_index.json").read_text())["docs"]:
        page = section["location"].partition("#")[0].removesuffix(".html")
        words = re.split(r"[^\w]+", re.sub(r"<[^>]+>", " ", section["title"] + " " + section["text"]).lower())
        titled = section["title"].lower().split()  # a title counts most
        counts = [words.count(word) + 1000 * titled.count(word) for word in query.lower().split()]
        if all(counts):
            found[page] = max(found.get(page, 0), sum(counts) / len(words))
    ranked = sorted(found, key=lambda page: -found[page])
    assert WORDS_OF_GUIDES[query] in ranked[:4], ranked[:8]


def test_every_verb_has_a_page_and_no_other() -> None:
    assert {page.stem for page in VERB_PAGES.glob("*.md")} == {*VERBS, "index"}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_page_covers_its_commands_and_their_options(verb: str) -> None:
    text = (VERB_PAGES / f"{verb}.md").read_text()
    command = main.get_command(click.Context(main), verb)
    assert command is not None
    assert text.startswith(f"# `areal-debug {verb}`\n")
    assert f"reference/cli.md#areal-debug-{verb})" in text
    assert re.search(r"exit code", text, re.IGNORECASE)
    for _, name in verbs_below(command, verb):
        assert f"## `areal-debug {verb} {name}`" in text
        assert f"reference/cli.md#areal-debug-{verb}-{name})" in text


@pytest.mark.long
def test_pages_of_the_site_are_reachable_from_its_navigation(site: Path) -> None:
    home = (site / "index.html").read_text()
    built = {str(page.relative_to(site)) for page in site.rglob("*.html")}
    listed = set(re.findall(r'href="([^"#:]+\.html)"', home))
    assert {page for page in built if not page.startswith("source/")} - listed == {"404.html"}


@pytest.mark.long
def test_a_link_of_a_page_to_a_file_outside_docs_leads_to_its_text(site: Path) -> None:
    text = (site / "source/examples/gsm8k_grpo.py.html").read_text()
    assert "PPOTrainer" in text
    examples = (site / "project/examples.html").read_text()
    assert 'href="../source/examples/gsm8k_grpo.py.html"' in examples
