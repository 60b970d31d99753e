"""Fixtures of many tests: a tiny model, this process as the only rank, torchrun jobs."""

import fcntl
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from tests.forks import run_forked, start_server, worker_command
from tests.huge_pages import use_huge_pages

# As in the Makefile, before anything imports torch: more threads than cores only wait for each
# other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A machine that is busy is no failure of an example.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

ROOT = Path(__file__).parent.parent
ON_RANKS = Path(__file__).with_name("on_ranks.py")
# In the order in which they start: what waits for servers and processes that hang, then the most
# CPU time.
FIRST = [
    *("tests/rollout/test_sglang_real.py", "tests/hangdoctor/real", "tests/debug/test_demo.py"),
    *("tests/rollout/test_pool_kill.py", "tests/debug", "tests/rollout", "tests/consistency"),
    *("tests/replayer", "tests/engine", "tests/launch", "tests/trainer", "tests/recorder/protocol"),
]
# Tests that share what is expensive to make: processes that hang, a record, a browser.
BROWSER = ("tests/view/", "tests/debug/test_open.py", "tests/debug/test_other_trainers.py")
ONE_SCOPE = (("tests/hangdoctor/real/",), ("tests/bug/",), BROWSER)
EXIT_STATUS = pytest.StashKey[int]()
FORKS = pytest.StashKey[subprocess.Popen[bytes]]()
SCRATCH = pytest.StashKey[str]()


def pytest_configure(config):
    """Start the process that forks programs; workers use that of the first process.

    Programs that are killed, torchrun and browsers leave temporary folders behind. Those of a run of
    pytest are in one, which it removes, but for the `tmp_path` of tests, which pytest itself keeps.
    """
    gc.disable()
    if not hasattr(config, "workerinput"):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        config.stash[SCRATCH] = os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="tests-")
        config.stash[FORKS] = start_server()


def pytest_collection_finish():
    """Leave the million objects of imported modules out of each garbage collection."""
    gc.freeze()
    gc.enable()
    use_huge_pages()
    # A trainer asks whether there are any: the real one looks at each, a tenth of a second a run.
    gc.get_freeze_count = lambda: 1


def pytest_sessionfinish(session, exitstatus):
    session.config.stash[EXIT_STATUS] = int(exitstatus)


def scope_of(nodeid: str) -> str:
    """Return what one worker runs: the file of a test, or the first name of its scope in ONE_SCOPE."""
    return next((scope[0] for scope in ONE_SCOPE if nodeid.startswith(scope)), nodeid.split("::")[0])


def pytest_collection_modifyitems(items):
    """Start with the slowest tests, so that the workers end at about the same time."""
    place = len(FIRST)
    items.sort(
        key=lambda item: min([i for i, first in enumerate(FIRST) if item.nodeid.startswith(first)] or [place])
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") != "load":
        return None  # another distribution was requested
    from xdist.scheduler import LoadScopeScheduling

    class ScopeScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return ScopeScheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs):
    """Let workers be forks: each would need ten seconds of CPU time to import the same libraries."""
    for spec in specs:
        spec.python = worker_command()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item):
    """Release what a test got from fixtures, so that `collect_garbage` can collect it."""
    item.funcargs.clear()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """End with the status of the tests, without the destructors of native libraries.

    A process that has loaded models in some tests crashes in libpython after Python's own end
    (signal 11, no Python frame), which would turn a run in which every test passed into a failure.
    """
    if FORKS in config.stash:
        config.stash[FORKS].communicate()
        shutil.rmtree(config.stash[SCRATCH], ignore_errors=True)
    if EXIT_STATUS in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[EXIT_STATUS])


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """`once(name, make)`: a folder that one worker makes by `make(folder)`, for all workers to read."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def made(name, make):
        folder = shared / name
        with open(shared / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                make(folder)
        return folder

    return made


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    from areal_core.testing import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    """One tab for all tests of pages: a browser takes seconds to start."""
    from tests.browser.chromium import browser_page

    with browser_page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="session")
def sglang(tmp_path_factory):
    """Start a real SGLang server in float32 on the CPU.

    `with sglang(model, "--is-embedding", enable_lora=True) as started`: options are of its config.
    """
    from areal_core.config import SGLangConfig
    from areal_core.launch.sglang_process import MODULE, SGLangServer, cpu_environment, server_args

    def start(
        model: Path,
        *flags: str,
        env: Mapping[str, str] | None = None,
        module: str = MODULE,
        **options: object,
    ):
        given = {"dtype": "float32", "context_length": 1024, "max_total_tokens": 16384} | options
        args = [*server_args(SGLangConfig(**given), "cpu"), *flags]
        log = tmp_path_factory.mktemp("sglang") / "llm_server_0.log"
        environment = cpu_environment() | (env or {})
        return SGLangServer(model, log, args, environment, ready_timeout_s=600.0, module=module)

    return start


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of an environment with vLLM, which is installed if there is none."""
    from tests.command_line import installed

    return installed(ROOT / "tests/vllm/install_vllm.sh")


@pytest.fixture(autouse=True, scope="session")
def known_code():
    """Compute once what records say of our repository, and of libraries until a module is new.

    Of 500 imported files of tests they say nothing. A record takes 0.3 s without.
    `recorder/test_code_identity.py` tests the functions themselves.
    """
    from recorder.environment import code

    identity, changed, local = code.repository_identity, code.changed_libraries, code.local_files
    ours = cache(identity)
    of_modules = cache(lambda names, num_modules: changed(names))
    of_script = cache(
        lambda script, num_modules: {file for file in local(script) if not file.is_relative_to(ROOT)}
    )
    with pytest.MonkeyPatch.context() as patched:
        for name, cached in (
            ("repository_identity", lambda at: (ours if at == ROOT / "recorder" else identity)(at)),
            ("changed_libraries", lambda names: deepcopy(of_modules(tuple(names), len(sys.modules)))),
            ("local_files", lambda script: set(of_script(script, len(sys.modules)))),
        ):
            patched.setattr(code, name, cached)
        yield


@pytest.fixture(autouse=True, scope="module")
def forget_rank():
    """Remove the variables that `join_ranks` sets for a job of one rank.

    Programs that later tests start would inherit them, and claim to be ranks of one job with those
    of another worker.
    """
    yield
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


@pytest.fixture(autouse=True, scope="module")
def collect_garbage():
    """Let what a file leaves open fail this file, not the one in which it is collected."""
    yield
    gc.collect()
    gc.freeze()  # what its imports added


@pytest.fixture(scope="module")
def ranks():
    """This process as the only rank of a job."""
    import torch

    from areal_core.engine.ranks import join_ranks, leave_ranks

    torch.set_num_threads(1)
    yield join_ranks("cpu")
    leave_ranks()


@pytest.fixture
def in_process(ranks, monkeypatch):
    """The `join` of a trainer that runs in this process, and leaves its process group open."""
    from areal_core.engine.ranks import Ranks

    monkeypatch.setattr(Ranks, "leave", lambda self: None)
    return lambda config: ranks


@pytest.fixture(scope="session")
def torchrun():
    """Run `main` of a file on several gloo ranks.

    `torchrun(program, 2, argument, ...)` returns what it returns on rank 0, as JSON has it.
    """

    def run(program: Path, num_ranks: int, *arguments: object, timeout_s: int = 120):
        options = ["--standalone", f"--nproc-per-node={num_ranks}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        module = ".".join(Path(program).relative_to(ROOT).with_suffix("").parts)
        argv = ["-m", "torch.distributed.run", *options, str(ON_RANKS), module, *map(str, arguments)]
        done = run_forked(argv, environment, timeout_s=timeout_s)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run
