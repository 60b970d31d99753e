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
