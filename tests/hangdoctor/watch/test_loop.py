"""Real small jobs under watch: stuck, slow, failing, empty, partly done; and what the watch does about each."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from hangdoctor.collect.sample import Options
from hangdoctor.heartbeat import VARIABLE, read_beats
from hangdoctor.model import Diagnosis
from hangdoctor.watch.judge import Limits
from hangdoctor.watch.loop import Plan, watch_command, watch_pids
from hangdoctor.watch.tree import lives

BEAT_THEN = """
import os, sys, threading, time
from hangdoctor.heartbeat import beat, done
for step in range({steps} + 1):
    beat(step)
    time.sleep(0.05)
{ending}
"""
STUCK = "threading.Event().wait()"


@pytest.fixture
def watched(tmp_path):
    """Watch a job of `steps` beats and an ending; gives its exit status, what was told, and what was diagnosed."""

    def watch(ending, steps=3, label="lock_deadlock", **plan):
        told, folders = [], []

        def diagnose(folder):
            folders.append(folder)
            return Diagnosis(label, "high", (0,), (), "Rank 0 waits for a lock.")

        program = tmp_path / "train.py"
        program.write_text(BEAT_THEN.format(steps=steps, ending=ending))
        chosen = Plan(tmp_path / "watch", Limits(quiet_s=1.0, watchdog_s=20), 0.1, options=Options(1), **plan)
        status = watch_command([sys.executable, str(program)], chosen, diagnose, told.append)
        return status, told, folders

    return watch


@pytest.mark.parametrize("status", [0, 7])
def test_job_that_ends_keeps_its_exit_status_and_is_left_alone(watched, status):
    assert watched(f"sys.exit({status})") == (status, [], [])


def test_stuck_job_is_collected_told_and_killed(watched, tmp_path):
    hook = f'echo "$HANGDOCTOR_LABEL $HANGDOCTOR_CULPRITS" >{tmp_path}/hook; ls "$HANGDOCTOR_FOLDER" >>{tmp_path}/hook'
    status, [told], [folder] = watched(STUCK, then="kill", hook=hook)
    assert status == 1
    assert told.startswith(
        "rank_0 silent for 1 s (limit 1 s): lock_deadlock: Rank 0 waits for a lock. Post-mortem: "
    )
    assert "wait" in (folder / "samples/0/rank_0.json").read_text()
    assert (tmp_path / "hook").read_text().split()[:3] == ["lock_deadlock", "0", "collection.json"]


def test_stuck_job_is_only_told_when_that_was_asked(watched):
    status, told, folders = watched("threading.Event().wait(2.5)", then="notify")
    assert (status, len(told), len(folders)) == (0, 1, 1)


def test_stuck_job_is_restarted_as_often_as_told(watched):
    once_stuck = f"if not os.path.exists('tried'):\n    open('tried', 'w').close()\n    {STUCK}"
    status, told, folders = watched(f"os.chdir(os.path.dirname(__file__))\n{once_stuck}", then="restart")
    assert (status, len(folders)) == (0, 1)
    assert told[1] == "restarting, 3 more times at most"


def test_slow_job_is_not_killed(watched):
    status, told, folders = watched("threading.Event().wait(2.5)", then="kill", label="straggler_or_not_hung")
    assert status == 0
    assert told[0].startswith("rank_0 silent for 1 s (limit 1 s), but it moves: ")
    assert len(folders) == 2  # the second look comes after twice the silence


def test_job_that_moves_again_before_it_is_killed_lives(watched):
    status, told, _ = watched("threading.Event().wait(1.3)\nbeat(9)\ntime.sleep(0.4)", then="kill")
    assert (status, told[-1]) == (0, "it moves again")


def test_finish_without_a_step_is_a_failure(watched):
    status, [told], folders = watched("done(0)", steps=0)
    assert (status, folders) == (1, [])
    assert "finished with status 0 and not one step" in told


def test_ranks_that_end_while_another_does_not_are_told(watched):
    status, told, _ = watched(f"done(3, 'rank_1')\n{STUCK}", then="kill")
    assert status == 1
    assert "; others have ended: lock_deadlock" in told[0]


def test_process_of_somebody_else_is_watched_by_its_pid_and_its_own_heartbeats(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(BEAT_THEN.format(steps=3, ending=STUCK))
    job = subprocess.Popen(
        [sys.executable, str(program)], env=os.environ | {VARIABLE: str(tmp_path / "beats")}
    )
    reaper = threading.Thread(target=job.wait)  # as its own parent would
    reaper.start()
    told = []
    plan = Plan(tmp_path, Limits(quiet_s=1.0, watchdog_s=20), 0.1, then="kill", options=Options(1))
    hung = Diagnosis("external_wait", "high", (0,), (), "Rank 0 waits.")
    assert watch_pids((job.pid,), plan, lambda folder: hung, told.append) == 1
    reaper.join()
    assert job.returncode == -15
    assert told[0].startswith("rank_0 silent for 1 s (limit 1 s): external_wait: Rank 0 waits.")
    assert read_beats(tmp_path / "beats")["rank_0"].step == 3


def test_process_without_heartbeats_is_watched_by_its_cpu_time(tmp_path):
    job = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    told = []
    plan = Plan(tmp_path, Limits(watchdog_s=1.0), 0.1, options=Options(1))
    hung = Diagnosis("external_wait", "high", (0,), (), "Rank 0 sleeps.")
    threading.Timer(3, job.kill).start()
    threading.Thread(target=job.wait).start()
    assert watch_pids((job.pid,), plan, lambda folder: hung, told.append) == 1
    assert told[0].startswith("rank_0 silent for ")


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
def test_rank_that_outlives_its_launcher_is_told_and_ended_where_ending_was_asked(watched, tmp_path, then):
    start = (
        "import subprocess\norphan = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    )
    status, [told], _ = watched(
        f"{start}\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(orphan.pid))\nos._exit(3)", then=then
    )
    orphan = int((tmp_path / "pid").read_text())
    assert status == 3
    assert told == f"1 processes outlived the job: pid {orphan}" + ("; ending them" if then == "kill" else "")
    assert lives(orphan) is (then == "notify")
    os.kill(orphan, signal.SIGKILL)
    os.waitpid(orphan, 0)  # ours by adoption
