"""Real recordings of a tiny run, and the command line in a subprocess."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.forks import COMMAND, run_forked

HERE = Path(__file__).parent
SCRIPT, CONFIG = HERE / "train_tiny.py", HERE / "tiny.yaml"


@pytest.fixture(scope="session")
def areal_debug():
    """Run the command and return the finished process: `areal_debug("replay", record)`."""

    def call(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return run_forked([COMMAND, *map(str, arguments)], os.environ | environment)

    return call


@pytest.fixture(scope="session")
def train(areal_debug, tiny_model, tmp_path_factory):
    """Train the tiny run: `train("--dump-rollout", folder, "seed=2")`, with its files in `to`."""

    def call(
        *arguments: object, to: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        files = to or tmp_path_factory.mktemp("run")
        paths = (f"cluster.fileroot={files}", f"actor.path={tiny_model}")
        return areal_debug("train", SCRIPT, "--config", CONFIG, *paths, *arguments, **environment)

    return call


@pytest.fixture(scope="session")
def recorded(train, once) -> Path:
    """Three recorded steps of one rank. Read-only: tests copy it before they change it."""

    def make(folder: Path) -> None:
        done = train("--dump-rollout", folder / "one")
        assert done.returncode == 0, done.stdout + done.stderr

    return once("recorded", make) / "one"


@pytest.fixture
def copied(recorded, tmp_path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "record"))
