"""The local launcher: environment of ranks, exit codes, and no processes left behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from areal_core.config import PPOConfig, SGLangConfig
from areal_core.config.allocation import parse_allocation
from areal_core.environment import DETERMINISTIC as DETERMINISM
from areal_core.errors import ServerFailed
from areal_core.launch import local, torchrun
from areal_core.launch.job import Job
from areal_core.launch.node import first_failure
from areal_core.launch.processes import end_tree, start
from areal_core.launch.sglang_process import SGLangServer, cpu_environment, option_args, server_args
from tests.forks import run_forked

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(tmp_path):
    def write(body: str) -> list[str]:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(body))
        return [str(path), str(tmp_path)]

    return write


def config(**options) -> PPOConfig:
    made = PPOConfig(experiment_name="e", trial_name="t", device="cpu", **options)
    made.actor.path = "some/model"
    made.sglang = SGLangConfig(random_seed=1)
    return made


def launch(argv, allocation, tmp_path, made=None, **options) -> int:
    job = Job(tuple(argv), made or config(), parse_allocation(allocation), {}, tmp_path / "logs", **options)
    return local.launch(job)


def no_child_left() -> bool:
    def command_of(process):
        with suppress(psutil.NoSuchProcess):  # a zombie has none
            return " ".join(process.cmdline())
        return ""

    return not [p for p in psutil.Process().children(recursive=True) if "sglang" in command_of(p)]


WRITE_ENVIRONMENT = """
import json, os, sys
with open(f"{sys.argv[1]}/rank{os.environ.get('RANK', 0)}.json", "w") as file:
    json.dump(dict(os.environ), file)
print("hello from a rank")
"""


SERVED = """
import sys
from pathlib import Path
from tests.launch.test_local import config, launch, no_child_left
code = launch(sys.argv[1:], "sglang:d2+fsdp:d2", Path(sys.argv[2]), config(deterministic=True))
assert no_child_left()
sys.exit(code)
"""


def forked(tmp_path, program, *argv):
    """Run a launcher in a fork, which forks its ranks: they import nothing again."""
    (tmp_path / "launcher.py").write_text(program)
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    return run_forked([str(tmp_path / "launcher.py"), *argv], os.environ | {"PYTHONPATH": path})


def test_ranks_get_servers_determinism_and_thread_limits(stop_file, script, tmp_path):
    done = forked(tmp_path, SERVED, *script(WRITE_ENVIRONMENT))
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank{i}.json").read_text()) for i in (0, 1)]
    addresses = ranks[0]["AREAL_LLM_SERVER_ADDRS"].split(",")
    assert len(set(addresses)) == 2
    assert ranks[0]["AREAL_LLM_SERVER_LOGS"] == ",".join(
        str(tmp_path / "logs" / f"llm_server_{i}.log") for i in (0, 1)
    )
    for env in ranks:
        assert env["WORLD_SIZE"] == "2"
        assert env["AREAL_LLM_SERVER_ADDRS"] == ",".join(addresses)
        assert env["OMP_NUM_THREADS"] == "1"
        assert {k: env[k] for k in DETERMINISM} == DETERMINISM
        assert "sgl_kernel_cpu" not in env.get("PYTHONPATH", "")  # only the server may see the stand-in
    assert (tmp_path / "logs" / "llm_server_1.log").read_text().startswith("model some/model\n")
    assert (tmp_path / "logs" / "trainer.log").read_text().count("hello from a rank") == 2
    assert done.stdout.count("hello from a rank") == 2


def test_a_server_that_cannot_start_is_reported_with_its_last_line_and_no_rank_starts(
    stop_file, script, tmp_path, capfd
):
    Path(f"{stop_file}1").touch()
    assert launch(script("raise SystemExit(5)"), "sglang:d1+fsdp:d1", tmp_path) == 1
    assert "ended with exit code 1" in (printed := capfd.readouterr().err)
    assert "no such model" in printed
    assert not (tmp_path / "logs" / "trainer.log").exists()


def test_a_run_outlives_one_of_two_servers_but_not_the_last(stop_file, script, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(torchrun, "GRACE_S", 0.5)
    argv = script(
        f"""
        import pathlib, time
        pathlib.Path({str(stop_file) + "1"!r}).touch()
        time.sleep(1.5)
        print("still here", flush=True)
        pathlib.Path({str(stop_file) + "2"!r}).touch()
        time.sleep(60)
        """
    )
    began = time.monotonic()
    assert launch(argv, "sglang:d2+fsdp:d1", tmp_path) == 1
    assert time.monotonic() - began < 50
    printed = capfd.readouterr()
    assert "still here" in printed.out
    assert printed.err.count("the scheduler died") == 2
    assert no_child_left()


LAUNCHER = """
import sys
from pathlib import Path
from areal_core.launch.torchrun import run_ranks
sys.exit(run_ranks(sys.argv[2:], int(sys.argv[1]), {}, Path(sys.argv[3]) / "logs"))
"""


def test_the_rank_that_failed_first_is_shown_and_what_others_have_started_is_ended(script, tmp_path):
    argv = script(
        """
        import os, pathlib, subprocess, sys, time
        if os.environ["RANK"] == "0":
            away = subprocess.Popen(["sleep", "60"], start_new_session=True)
            pathlib.Path(sys.argv[1], f"{away.pid}.pid").touch()
            time.sleep(60)
        while not list(pathlib.Path(sys.argv[1]).glob("*.pid")):
            time.sleep(0.01)
        raise ValueError("no such weights")
        """
    )
    done = forked(tmp_path, LAUNCHER, "2", *argv)
    assert done.returncode == 1
    first = "rank 1 failed first, with exit code 1; the last lines of its standard error:\n    Traceback"
    assert first in done.stdout
    assert done.stdout.endswith("    ValueError: no such weights\n")
    [away] = tmp_path.glob("*.pid")
    assert not is_running(int(away.stem))


@pytest.mark.parametrize(
    ("ends", "rank", "time_s"),
    [({10: 5.0}, 1, 4), ({11: 4.9}, 1, 4.9), ({10: 5.0, 11: 4.9}, 1, 4.9), ({10: 5.0, 11: 5.1}, 0, 5.0)],
)
def test_the_first_rank_that_failed_is_known_where_an_end_was_not_noted(ends, rank, time_s):
    late, early = (SimpleNamespace(pid=10 + n, exitcode=c, timestamp=5 - n) for n, c in enumerate((-15, 3)))
    found = first_failure(SimpleNamespace(failures={1: early, 0: late}), ends)
    assert (found.rank, found.time_s, found.exit_code) == (rank, time_s, 3 if rank else 143)


def test_servers_and_ranks_that_share_devices_are_started_together(
    stop_file, script, tmp_path, capfd, monkeypatch
):
    assert launch(script(WRITE_ENVIRONMENT), "sglang:d1|fsdp:d1", tmp_path) == 0
    assert "AREAL_LLM_SERVER_ADDRS" in json.loads((tmp_path / "rank0.json").read_text())
    capfd.readouterr()
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", "127.0.0.1:9")
    assert launch(script(WRITE_ENVIRONMENT), "sglang:d1|fsdp:d1", tmp_path) == 2
    sentence = (
        "AREAL_LLM_SERVER_ADDRS is '127.0.0.1:9', and the allocation sglang:d1|fsdp:d1 starts its servers"
    )
    assert sentence in capfd.readouterr().err


@pytest.mark.parametrize(
    ("number", "code"),
    [
        *((signal.SIGTERM, 143), (signal.SIGKILL, -9)),
        *(pytest.param(*row, marks=pytest.mark.long) for row in ((signal.SIGINT, 130), (signal.SIGHUP, 129))),
    ],
)
def test_the_end_of_the_launcher_ends_the_ranks(script, tmp_path, number, code):
    argv = script(
        "import pathlib, os, sys, time; pathlib.Path(sys.argv[1], str(os.getpid()) + '.pid').touch(); time.sleep(60)"
    )
    # A shell starts background jobs with SIGINT ignored, and the launcher leaves it so.
    defaults = ["env", "--default-signal=INT", "--default-signal=HUP"]
    launcher = subprocess.Popen([*defaults, sys.executable, "-c", LAUNCHER, "1", *argv])
    while not (started := list(tmp_path.glob("*.pid"))):
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.send_signal(number)
    assert launcher.wait(30) == code
    deadline = time.monotonic() + 30
    while is_running(int(started[0].stem)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
def test_a_second_signal_ends_ranks_that_ignore_the_first(script, tmp_path):
    argv = script(
        """
        import os, pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(sys.argv[1], "heard").touch())
        pathlib.Path(sys.argv[1], f"{os.getpid()}.pid").touch()
        while True:
            time.sleep(60)
        """
    )
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, "1", *argv])
    for sign in ("*.pid", "heard"):  # the grace is 10 s
        while not list(tmp_path.glob(sign)):
            assert launcher.poll() is None
            time.sleep(0.05)
        launcher.send_signal(signal.SIGTERM)
        start_s = time.monotonic()
    assert launcher.wait(30) == 128 + signal.SIGTERM
    assert time.monotonic() - start_s < 8


def is_running(pid: int) -> bool:
    """Return whether a process runs.

    A zombie has ended, though this process may have become the parent that reaps it.
    """
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.long
def test_a_server_that_is_late_is_stopped_and_reported(tmp_path, monkeypatch):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(
        "import time; print('loading', flush=True); time.sleep(60)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = SGLangServer("m", tmp_path / "s.log", [], cpu_environment(), ready_timeout_s=1.5)
    with pytest.raises(
        ServerFailed, match=r"not ready after 2 s: server 127.0.0.1:\d+; the last lines of .*\n    loading"
    ):
        server.wait_until_ready()
    assert server.process.returncode == -signal.SIGTERM


def test_a_process_that_no_search_finds_is_ended_too(tmp_path, monkeypatch):
    monkeypatch.setattr("areal_core.launch.processes.find_members", lambda process: set())
    with (tmp_path / "log").open("wb") as log:
        process = start(["sleep", "60"], {}, log)
    end_tree(process, grace_s=0.1)
    assert process.returncode == -signal.SIGKILL


def test_ending_a_process_ends_its_orphaned_grandchildren_too(tmp_path):
    body = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    with (tmp_path / "log").open("wb") as log:
        parent = start([sys.executable, "-c", body], {}, log)
    parent.wait(10)
    grandchild = int((tmp_path / "log").read_text())
    assert psutil.pid_exists(grandchild)
    end_tree(parent)
    assert not is_running(grandchild)


@pytest.mark.long
def test_an_orphan_that_takes_long_to_free_its_memory_has_ended_too(tmp_path):
    """While it exits, it is no zombie yet, and the mark in its environment is gone."""
    memory = "import time; kept = bytearray(b'1') * 600_000_000; print('ready', flush=True); time.sleep(60)"
    body = f"""if True:
        import subprocess, sys
        orphan = subprocess.Popen(
            [sys.executable, "-c", {memory!r}], stdout=subprocess.PIPE, start_new_session=True
        )
        orphan.stdout.readline()
        print(orphan.pid, flush=True)
    """
    with (tmp_path / "log").open("wb") as log:
        parent = start([sys.executable, "-c", body], {}, log)
    parent.wait(30)
    orphan = int((tmp_path / "log").read_text())
    assert is_running(orphan)
    end_tree(parent)
    assert not is_running(orphan)


def test_server_options_become_flags():
    options = SGLangConfig(disable_cuda_graph=True, cuda_graph_bs=[1, 2], enable_multithread_load=True)
    args = option_args(options)
    assert "--disable-cuda-graph" in args
    assert "--enable-lora" not in args
    assert "--model-path" not in args
    assert args[args.index("--cuda-graph-bs") :][:3] == ["--cuda-graph-bs", "1", "2"]
    assert args[-2:] == ["--model-loader-extra-config", '{"enable_multithread_load": true}']
    gpu = server_args(options, "cuda", tensor_size=2, base_gpu_id=4)
    assert gpu[-4:] == ["--tp-size", "2", "--base-gpu-id", "4"]
    assert gpu[gpu.index("--attention-backend") + 1] == "fa3"
    assert server_args(options, "cpu")[:2] == ["--device", "cpu"]
    assert os.environ.get("PYTHONPATH", "") in cpu_environment()["PYTHONPATH"]
