"""Small real jobs under watch: stuck, slow, failing, empty, partly done; and the reactions."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from hangdoctor.collect.pyspy import Options
from hangdoctor.heartbeat import VARIABLE, read_beats
from hangdoctor.model import Diagnosis
from hangdoctor.watch.liveness import Limits
from hangdoctor.watch.loop import Plan, lives, watch_command, watch_pids

BEAT_THEN = """
import os, sys, threading, time
from hangdoctor.heartbeat import beat, done
for step in range({steps} + 1):
    beat(step)
    time.sleep(0.05)


def wait_for_message(number):
    # however loaded the machine is
    while not os.path.exists(os.path.join(os.path.dirname(__file__), f"message{{number}}")):
        time.sleep(0.02)


{ending}
"""
STUCK = "threading.Event().wait()"


@pytest.fixture
def watched(tmp_path):
    """Watch a job of `steps` beats and an ending; return exit status, messages, folders."""

    def watch(ending, steps=3, label="lock_deadlock", **plan):
        messages, folders = [], []

        def diagnose(folder):
            folders.append(folder)
            return Diagnosis(label, "high", (0,), (), "Rank 0 waits for a lock.")

        def report(message):
            messages.append(message)
            (tmp_path / f"message{len(messages)}").touch()

        program = tmp_path / "train.py"
        program.write_text(BEAT_THEN.format(steps=steps, ending=ending))
        chosen = Plan(tmp_path / "watch", Limits(quiet_s=1.0, watchdog_s=20), 0.1, options=Options(1), **plan)
        status = watch_command([sys.executable, str(program)], chosen, diagnose, report)
        return status, messages, folders

    return watch


def test_watcher_no_longer_adopts_orphans_when_the_job_has_ended(watched, tmp_path):
    """An orphan of a later program would stay as a zombie of this process."""
    watched("sys.exit(0)")
    child = "import os, subprocess; os.write(1, b'%d' % subprocess.Popen(['sleep', '0']).pid); os._exit(0)"
    orphan = int(subprocess.run([sys.executable, "-c", child], capture_output=True, check=True).stdout)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(orphan) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not psutil.pid_exists(orphan)


def test_stuck_job_is_collected_reported_and_killed(watched):
    status, [message], [folder] = watched(STUCK, then="kill")
    assert status == 1
    assert message.startswith(
        "rank_0 silent for 1 s (limit 1 s): lock_deadlock: Rank 0 waits for a lock. Post-mortem: "
    )
    assert "wait" in (folder / "samples/0/rank_0.json").read_text()


def test_slow_job_is_reported_with_the_rank_that_slows_it(watched, monkeypatch):
    asked = []

    def about(search, seconds):
        asked.append(seconds)
        return "Rank 1 is slow."

    monkeypatch.setattr("hangdoctor.watch.loop.sentence_about", about)
    _, messages, _ = watched("wait_for_message(1)", label="straggler_or_not_hung", slow_s=7.0)
    assert messages[0].endswith("but it moves: Rank 1 is slow.")
    assert asked[0] == 7.0


def test_job_that_moves_again_before_it_is_killed_lives(watched):
    status, messages, _ = watched("wait_for_message(1)\nbeat(9)\nwait_for_message(2)", then="kill")
    assert (status, messages[-1]) == (0, "it moves again")


def test_process_of_somebody_else_is_watched_by_its_pid_and_its_own_heartbeats(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(BEAT_THEN.format(steps=3, ending=STUCK))
    job = subprocess.Popen(
        [sys.executable, str(program)], env=os.environ | {VARIABLE: str(tmp_path / "beats")}
    )
    reaper = threading.Thread(target=job.wait)  # as its own parent would
    reaper.start()
    messages = []
    plan = Plan(tmp_path, Limits(quiet_s=1.0, watchdog_s=20), 0.1, then="kill", options=Options(1))
    hung = Diagnosis("external_wait", "high", (0,), (), "Rank 0 waits.")
    assert watch_pids((job.pid,), plan, lambda folder: hung, messages.append) == 1
    reaper.join()
    assert job.returncode == -15
    assert messages[0].startswith("rank_0 silent for 1 s (limit 1 s): external_wait: Rank 0 waits.")
    assert read_beats(tmp_path / "beats")["rank_0"].step == 3


LATE = """
import os, subprocess, sys, time
asleep = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(8)"], env=os.environ | {"RANK": "0"})
time.sleep(1.5)
busy = "import itertools, time; end = time.monotonic() + 5; any(time.monotonic() > end for _ in itertools.count())"
subprocess.run([sys.executable, "-c", busy], env=os.environ | {"RANK": "1"})
asleep.kill()
asleep.wait()
"""


@pytest.mark.long
def test_a_rank_that_started_after_the_last_scan_and_works_is_seen_before_a_hang_is_reported(tmp_path):
    job = subprocess.Popen([sys.executable, "-c", LATE])
    threading.Thread(target=job.wait).start()
    messages = []
    plan = Plan(tmp_path, Limits(watchdog_s=6.0), 0.1, options=Options(1))
    hung = Diagnosis("external_wait", "high", (0,), (), "Rank 0 sleeps.")
    assert watch_pids((job.pid,), plan, lambda folder: hung, messages.append) == 0
    assert messages == []


def test_signals_to_the_watcher_reach_the_job(watched, tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    ready = tmp_path / "ready"

    def send_when_ready():
        while not ready.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    sender = threading.Thread(target=send_when_ready)
    sender.start()
    ending = (
        f"import signal\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))\nopen({str(ready)!r}, 'w')"
    )
    status, _, _ = watched(f"{ending}\ntime.sleep(60)", label="straggler_or_not_hung")
    sender.join()
    assert status == 5
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize("then", ["notify", "kill"])
def test_rank_that_outlives_its_launcher_is_reported_and_ended_unless_notify(watched, tmp_path, then):
    start = (
        "import subprocess\norphan = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    )
    status, [message], _ = watched(
        f"{start}\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(orphan.pid))\nos._exit(3)", then=then
    )
    orphan = int((tmp_path / "pid").read_text())
    assert status == 3
    assert message == f"1 processes outlived the job: pid {orphan}" + (
        "; ending them" if then == "kill" else ""
    )
    assert lives(orphan) is (then == "notify")
    os.kill(orphan, signal.SIGKILL)
    os.waitpid(orphan, 0)  # ours by adoption
