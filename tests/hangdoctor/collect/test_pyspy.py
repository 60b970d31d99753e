"""Meaning of py-spy's exit codes and messages, with real or scripted ones; advice after a refusal."""

import os
import signal

import pytest

from hangdoctor.collect import pyspy
from hangdoctor.collect.pyspy import Access, explain_refusal

from .sleeper import sleeping


@pytest.fixture
def target():
    """A real Python process that sleeps in a function named `wait_here`."""
    code = "import time\ndef wait_here():\n    print(flush=True)\n    time.sleep(600)\nwait_here()"
    with sleeping(code) as process:
        yield process


def script(tmp_path, body):
    """A scripted py-spy, for results that a real one cannot be made to return."""
    path = tmp_path / "py-spy"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_stopped_python_is_dumped_without_waking_it(target):
    os.kill(target.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, target.pid, os.WSTOPPED | os.WNOWAIT)
    done = pyspy.dump(pyspy.find_pyspy(), target.pid, timeout_s=10)
    assert (done.status, '"name": "wait_here"' in done.output) == ("dumped", True)


STARTING = """if [ -e "$0.tried" ]; then echo '[]'; exit 0; fi
touch "$0.tried"; echo 'Error: Failed to find python version from target process' >&2; exit 1"""
TORN = "case \"$*\" in *--nonblocking*) echo 'Error: failed to read frame' >&2; exit 1;; *) echo '[]';; esac"


@pytest.mark.parametrize("body", [STARTING, TORN])
def test_a_starting_interpreter_is_tried_again_and_torn_reads_end_in_a_dump_that_pauses(tmp_path, body):
    done = pyspy.dump(script(tmp_path, body), 1, timeout_s=10)
    assert (done.status, done.output) == ("dumped", "[]\n")


def test_refusal_is_distinguished_from_other_failures(tmp_path):
    tool = script(
        tmp_path, 'echo "Permission Denied: Try running again with elevated permissions" >&2; exit 1'
    )
    done = pyspy.dump(tool, 1, timeout_s=10)
    assert done.status == "not_permitted"
    assert done.complaint.startswith("Permission Denied")


def test_py_spy_that_hangs_itself_is_given_up(tmp_path):
    done = pyspy.dump(script(tmp_path, "exec sleep 600"), 1, timeout_s=0.2)
    assert (done.status, done.detail) == ("timed_out", "py-spy did not finish in 0.2 s")


@pytest.mark.parametrize(
    ("access", "advice"),
    [
        (Access(1, False, 1000, 1000, False), "sudo sysctl kernel.yama.ptrace_scope=0"),
        (Access(0, False, 1000, 0, False), "belongs to uid 0 and this command runs as uid 1000"),
        (Access(2, False, 1000, 1000, False), "ptrace_scope is 2: run this with sudo"),
        (Access(3, True, 0, 0, False), "no process may read it until a reboot"),
        (Access(None, False, 0, 0, True), "docker run --cap-add SYS_PTRACE"),
        (Access(None, False, 0, 0, False), "run this with CAP_SYS_PTRACE"),
    ],
)
def test_refusal_names_the_cause_and_the_remedy(access, advice):
    text = explain_refusal(access)
    assert advice in text
    assert "areal-debug hang watch -- COMMAND" in text
    assert "faulthandler.register(signal.SIGUSR1" in text
