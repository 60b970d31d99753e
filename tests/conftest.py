"""What many tests share: a tiny model on disk, this process as a job of one rank, and real torchrun jobs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# As the Makefile does, before anything imports torch: more threads than cores only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parent.parent
EXIT_STATUS = pytest.StashKey[int]()


def pytest_sessionfinish(session, exitstatus):
    session.config.stash[EXIT_STATUS] = int(exitstatus)


def pytest_collection_modifyitems(items):
    """Let one worker run all tests of a folder: they share session fixtures, such as servers and records."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(str(item.path.parent.relative_to(ROOT))))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """End with the status of the tests, without the destructors of native libraries.

    A process that has loaded models in some tests crashes in libpython after Python's own end (signal 11, no Python frame), which would
    turn a run in which every test passed into a failure.
    """
    if EXIT_STATUS in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[EXIT_STATUS])


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    from areal_core.testing import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ranks():
    """This process as the only rank of a job."""
    import torch

    from areal_core.engine.ranks import join_ranks, leave_ranks

    torch.set_num_threads(1)
    yield join_ranks("cpu")
    leave_ranks()


@pytest.fixture(scope="session")
def torchrun():
    """Run a Python file on several gloo ranks: `torchrun(program, 2, argument, ...)` gives what rank 0 printed last, as JSON."""

    def run(program: Path, num_ranks: int, *arguments: object, timeout_s: int = 120):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={num_ranks}",
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, str(program), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environment,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run
