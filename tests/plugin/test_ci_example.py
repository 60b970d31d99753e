"""The CI job of examples/ci: its commands run in a fresh folder, as a user copies them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/ci"


@pytest.fixture
def project(tmp_path):
    """A repository with the copied files."""
    (tmp_path / ".github/workflows").mkdir(parents=True)
    shutil.copy(EXAMPLE / "training.yml", tmp_path / ".github/workflows")
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def run_job(project: Path, code: Path) -> tuple[list[str], int, str]:
    """Run the job's commands, but for its installation, up to the first that fails."""
    workflow = yaml.safe_load((project / ".github/workflows/training.yml").read_text())
    job = workflow["jobs"]["replay"]
    commands = [step["run"] for step in job["steps"] if "run" in step and step["name"] != "Install"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment |= job["env"] | {"PATH": path, "PYTHONPATH": str(code)}
    output = ""
    for command in commands:
        done = subprocess.run(
            ["bash", "-e", "-c", command],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        output += done.stdout + done.stderr
        if done.returncode:
            break
    return commands, done.returncode, output


@pytest.mark.long
def test_the_job_passes_and_leaves_nothing_in_the_repository(project):
    commands, code, output = run_job(project, ROOT)
    assert len(commands) == 2
    assert code == 0, output
    assert "4 steps of 1 record replayed" in output
    left = subprocess.run(
        ["git", "status", "--short", "--untracked-files=all"],
        cwd=project,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    new = [line[3:] for line in left.splitlines() if not line[3:].startswith(("tests/", ".github/"))]
    assert [name for name in new if not name.startswith(".pytest_cache/")] == ["replay.xml"]
