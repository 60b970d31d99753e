"""Fixtures of many tests: a tiny model, this process as the only rank, torchrun jobs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# As in the Makefile, before anything imports torch: more threads than cores only wait for each
# other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parent.parent
SLOWEST_FOLDERS = [
    *("tests/debug", "tests/consistency", "tests/engine", "tests/rollout"),
    *("tests/launch", "tests/hangdoctor/real", "tests/replayer", "tests/trainer"),
]
EXIT_STATUS = pytest.StashKey[int]()


def pytest_sessionfinish(session, exitstatus):
    session.config.stash[EXIT_STATUS] = int(exitstatus)


def folder_of(nodeid: str) -> str:
    """Return the folder of a test, which is what one worker runs.

    Tests of a folder share session fixtures, such as servers and records.
    """
    return nodeid.split("::")[0].rpartition("/")[0]


def pytest_collection_modifyitems(items):
    """Start with the slowest folders, so that the workers end at about the same time."""
    order = {folder: place for place, folder in enumerate(SLOWEST_FOLDERS)}
    items.sort(key=lambda item: order.get(folder_of(item.nodeid), len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") != "load":
        return None  # another distribution was requested
    from xdist.scheduler import LoadScopeScheduling

    class FolderScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return folder_of(nodeid)

    return FolderScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """End with the status of the tests, without the destructors of native libraries.

    A process that has loaded models in some tests crashes in libpython after Python's own end
    (signal 11, no Python frame), which would turn a run in which every test passed into a failure.
    """
    if EXIT_STATUS in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[EXIT_STATUS])


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    from areal_core.testing import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of an environment with vLLM, which is installed if there is none."""
    done = subprocess.run([ROOT / "tests/vllm/install_vllm.sh"], capture_output=True, text=True, timeout=1200)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(autouse=True, scope="module")
def forget_rank():
    """Remove the variables that `join_ranks` sets for a job of one rank.

    Programs that later tests start would inherit them, and claim to be ranks of one job with those
    of another worker.
    """
    yield
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


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
    """Run a Python file on several gloo ranks.

    `torchrun(program, 2, argument, ...)` returns the last line that rank 0 printed, parsed as JSON.
    """

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
