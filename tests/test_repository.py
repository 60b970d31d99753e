"""Workflows, versions and templates, compared with the Makefile and pyproject.toml."""

import os
import re
import subprocess
import sys
import tomllib
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
import yaml

from areal_debug.cli import main

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")
}
JOBS = [(f"{name}.{job}", body) for name, flow in WORKFLOWS.items() for job, body in flow["jobs"].items()]
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"^([A-Z_]+) [?:]?=", MAKEFILE, re.MULTILINE))


def commands(job: dict) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


@pytest.mark.parametrize(("name", "job"), JOBS)
def test_a_job_calls_targets_and_variables_of_the_makefile(name, job):
    for target, arguments in re.findall(r"\bmake ([a-z-]+)(.*)", commands(job)):
        assert target in TARGETS
        assert set(re.findall(r"\b([A-Z_]+)=", arguments)) <= VARIABLES


@pytest.mark.parametrize(("name", "job"), JOBS)
def test_a_job_has_a_limit_and_pinned_actions_and_keeps_no_token(name, job):
    assert 0 < job["timeout-minutes"] <= 360
    for step in job["steps"]:
        if "uses" in step:
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@([0-9a-f]{40}|release/v\d+)", step["uses"])
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_only_the_publishing_job_has_a_permission_and_no_workflow_has_a_secret():
    assert {name: flow["permissions"] for name, flow in WORKFLOWS.items()} == {
        name: {"contents": "read"} for name in ("ci", "nightly", "release")
    }
    assert {name: job["permissions"] for name, job in JOBS if "permissions" in job} == {
        "release.publish": {"id-token": "write"}
    }
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        assert "secrets." not in path.read_text()


def test_pythons_of_the_workflows_are_those_of_the_classifiers():
    listed = {c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)}
    jobs = dict(JOBS)
    assert set(jobs["ci.light"]["strategy"]["matrix"]["python-version"]) == listed
    assert PROJECT["requires-python"] == f">={min(listed, key=lambda v: int(v[2:]))}"
    for _, job in JOBS:
        for step in job["steps"]:
            asked = step.get("with", {}).get("python-version", "3.11")
            assert asked in listed or asked == "${{ matrix.python-version }}"


def test_the_version_is_one_and_has_a_section_in_the_changelog():
    here = PROJECT["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == here
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1] == f"{here} - {citation['date-released']}"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])


def metadata(folder: Path, repository: str) -> Message:
    """Make the metadata of the wheel, as `pip` asks for it, from a copy of its files."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    (folder / "examples").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", "from setuptools.build_meta import *; prepare_metadata_for_build_wheel('.')"],
        cwd=folder,
        env={**os.environ, "AREAL_DEBUG_REPOSITORY": repository},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (written,) = folder.glob("*.dist-info/METADATA")
    return message_from_bytes(written.read_bytes())


def test_links_on_the_page_of_the_index_lead_to_the_repository(tmp_path):
    found = metadata(tmp_path, "https://example.org/us/areal-debug")
    text = found.get_payload()
    links = re.findall(r"\]\(([^)]+)\)", text)
    tag = f"https://example.org/us/areal-debug/blob/v{PROJECT['version']}/"
    assert f"{tag}docs/tour.md" in links
    assert [link for link in links if not link.startswith("https://")] == []
    urls = dict(line.split(", ") for line in found.get_all("Project-URL"))
    assert urls["Changelog"] == f"{tag}CHANGELOG.md"
    assert set(urls) == {"Source", "Documentation", "Changelog", "Issues"}


def test_without_an_address_the_page_of_the_index_has_no_link_that_leads_nowhere(tmp_path):
    found = metadata(tmp_path, "")
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_all("Project-URL") is None
    text = found.get_payload()
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")] == []
    assert "[A tour of five minutes]" not in text
    assert "A tour of five minutes" in text


def test_the_bug_form_asks_for_commands_that_exist():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    text = " ".join(part["attributes"].get("description", "") for part in form["body"])
    asked = {tuple(c.split()) for c in re.findall(r"areal-debug ((?:record|hang) [a-z]+)", text)}
    assert asked == {("record", "cut"), ("hang", "collect")}
    for verb, command in asked:
        assert command in main.get_command(None, verb).list_commands(None)


def test_each_hook_before_a_commit_runs_a_tool_of_the_project():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"].split()[0] for hook in hooks] == [".venv/bin/ruff"] * 2 + [".venv/bin/python"]
    for file in re.findall(r"tests/\S+", hooks[2]["entry"]):
        assert (ROOT / file).is_file()
