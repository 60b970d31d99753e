"""Each option, verb, label, cause, finding and quantity has an entry in the reference pages."""

import dataclasses
import re
import runpy
import subprocess
import sys
import typing
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_core.config import DPOConfig, PPOConfig, RWConfig, SFTConfig
from hangdoctor.model import Label

ROOT = Path(__file__).parents[2]
reference = SimpleNamespace(**runpy.run_path(str(ROOT / "docs/hooks/reference.py")))
ANCHORED = ("options", "cli", "labels", "causes", "findings", "metrics", "probes")


def anchors(page: str) -> Counter[str]:
    return Counter(re.findall(r"\{ #([^ }]+) \}", page))


def ids_in(folder: str, pattern: str) -> set[str]:
    """Ids that stand alone in quotes in the code that reports them."""
    files = (ROOT / folder).rglob("*.py")
    return {id.lower() for file in files for id in re.findall(rf'"({pattern})"', file.read_text())}


def test_a_checkout_has_a_heading_for_each_page() -> None:
    headings = re.findall("^## (.+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    assert {heading.lower() for heading in headings} == set(reference.PAGES)


@pytest.mark.parametrize("name", ANCHORED)
def test_no_two_entries_share_an_anchor(name: str) -> None:
    repeated = {anchor: n for anchor, n in anchors(reference.PAGES[name]()).items() if n > 1}
    assert not repeated


def test_every_hang_label_has_an_entry() -> None:
    assert set(anchors(reference.labels())) == set(typing.get_args(Label))


def test_every_reported_cause_has_an_entry() -> None:
    assert ids_in("consistency/causes", r"R\d\d") <= set(anchors(reference.causes()))


def test_every_reported_finding_has_an_entry() -> None:
    reported = ids_in("areal_debug/doctor/rules", r"D\d\d") | ids_in("areal_debug/doctor/samples", r"S\d\d")
    assert len(reported) > 45
    assert reported <= set(anchors(reference.findings()))


def test_every_name_that_documents_import_has_an_entry() -> None:
    imports = r"^ *(?:>>> )?from ((?:areal_debug|areal_core|recorder)[\w.]*) import ([\w, ]+)$"
    texts = [file.read_text() for file in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    found = [pair for text in texts for pair in re.findall(imports, text, re.MULTILINE)]
    found = [("recorder" if module == "areal_debug.record" else module, several) for module, several in found]
    names = {f"{module}.{name.strip()}" for module, several in found for name in several.split(",")}
    assert len(names) > 15
    assert names <= set(reference.API)


@pytest.mark.parametrize(
    ("kind", "cls"), [("grpo", PPOConfig), ("sft", SFTConfig), ("rw", RWConfig), ("dpo", DPOConfig)]
)
def test_every_option_of_a_config_has_an_entry(kind: str, cls: type) -> None:
    fields = {f"{kind}-{f.name}" for f in dataclasses.fields(cls) if not f.name.startswith("_")}
    nested = {"sft-cluster-name_resolve-type", "grpo-actor-optimizer-lr"}
    assert fields | nested <= set(anchors(reference.options()))


@pytest.mark.long
def test_the_pages_build_in_strict_mode_with_their_anchors(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# Home\n")
    (tmp_path / "mkdocs.yml").write_text(
        f"site_name: test\ntheme: mkdocs\nhooks: [{ROOT / 'docs/hooks/reference.py'}]\n"
        "markdown_extensions: [attr_list, def_list, md_in_html, tables]\n"
        "plugins: [{mkdocstrings: {handlers: {python: {"
        f"paths: [{ROOT}], options: {{preload_modules: [recorder, replayer], docstring_options: {{warnings: false}}}}}}}}}}}}]\n"
    )
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"], cwd=tmp_path, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr[-3000:]
    for page, anchor in {"findings": "d18", "causes": "r35", "labels": "collective_mismatch"}.items():
        assert f'id="{anchor}"' in (tmp_path / f"site/reference/{page}/index.html").read_text()
    assert 'id="recorder.open_record"' in (tmp_path / "site/reference/api/index.html").read_text()
