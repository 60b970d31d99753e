"""Programs on ranks that are forks of one process, which has imported what they need."""

import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from areal_core.launch.warm import warm_ranks


@pytest.fixture
def warm():
    """A process that has imported a module, with a variable that it read at its start."""
    with warm_ranks({"PYTHONHASHSEED": "7"}, ["colorsys", "no_such_module"]) as ranks:
        yield ranks


@pytest.fixture
def run(warm, tmp_path):
    """Run a program; return its exit code and its output."""

    def call(program: str, num_ranks: int = 1, **environment: str) -> tuple[int, str]:
        file = tmp_path / "program.py"
        file.write_text(textwrap.dedent(program))
        log = tmp_path / "logs" / "ranks.log"
        code = warm.run([str(file), "argument"], num_ranks, environment, log, echo=False)
        return code, log.read_text()

    return call


def test_ranks_are_numbered_and_can_meet_at_an_address(run, tmp_path):
    program = f"""
    import os, pathlib
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
    text = " ".join(os.environ[name] for name in names)
    pathlib.Path({str(tmp_path)!r}, os.environ["RANK"]).write_text(text + " " + os.environ["MASTER_PORT"])
    """
    assert run(program, num_ranks=2) == (0, "")
    zero, one = ((tmp_path / name).read_text().split() for name in ("0", "1"))
    assert zero[:4] == ["0", "0", "2", "127.0.0.1"]
    assert one == ["1", "1", *zero[2:]]


@pytest.mark.parametrize(
    ("ending", "code", "output"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('a sentence')", 1, "a sentence\n"),
        ("os.kill(os.getpid(), 9)", 137, ""),
        ("threading.Thread(target=lambda: (time.sleep(0.3), print('late'))).start()", 0, "late\n"),
    ],
)
def test_the_exit_code_is_that_of_python_and_threads_are_awaited(run, ending, code, output):
    assert run(f"import os, sys, threading, time; {ending}") == (code, output)


def test_the_first_rank_that_fails_ends_the_others_with_its_code(run):
    program = """
    import os, sys, time
    if os.environ["RANK"] == "1":
        sys.exit(5)
    time.sleep(60)
    """
    started_at = time.monotonic()
    assert run(program, num_ranks=2)[0] == 5
    assert time.monotonic() - started_at < 30


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_rank_leaves_behind_is_ended(run):
    program = """
    import subprocess
    print(subprocess.Popen(["sleep", "100"], start_new_session=True).pid)
    """
    code, output = run(program)
    assert code == 0
    assert not Path(f"/proc/{int(output)}").exists()


def test_a_server_that_was_killed_is_a_failed_run_and_no_wait(warm, run):
    warm.server.send_signal(signal.SIGKILL)
    warm.server.wait()
    assert run("print(1)") == (137, "")
