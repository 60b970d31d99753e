"""The commands as a user types them, on jobs that really hang."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [str(Path(sys.executable).with_name("areal-debug")), "hang"]
DEADLOCK = """
import threading
from hangdoctor.heartbeat import beat
weights_lock, metrics_lock, both = threading.Lock(), threading.Lock(), threading.Barrier(2)
def report():
    with metrics_lock:
        both.wait()
        weights_lock.acquire()
def update():
    with weights_lock:
        both.wait()
        metrics_lock.acquire()
beat(1)
threading.Thread(target=report, name="metrics").start()
update()
"""


@pytest.mark.long
def test_live_diagnosis_of_a_torchrun_job_by_the_pid_of_its_launcher(hanging):
    with hanging("swapped_order") as [launcher]:
        done = subprocess.run(
            [*COMMAND, "--pid", str(launcher), "--json"], capture_output=True, text=True, check=False
        )
    assert done.returncode == 1, done.stderr
    diagnosis = json.loads(done.stdout)
    assert (diagnosis["label"], diagnosis["culprit_ranks"]) == ("collective_mismatch", [2])
    assert diagnosis["confidence"] == "high"


def test_watched_job_that_deadlocks_is_explained_and_killed(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(DEADLOCK)
    options = ["--silence", "1", "--poll", "0.2", "--then", "kill", "--output", str(tmp_path / "watch")]
    done = subprocess.run(
        [*COMMAND, "watch", *options, "--", sys.executable, str(program)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1
    assert "lock_deadlock" in done.stderr
    [folder] = (tmp_path / "watch").glob("hang-*")
    diagnosis = json.loads((folder / "diagnosis.json").read_text())
    assert (diagnosis["label"], diagnosis["culprit_ranks"]) == ("lock_deadlock", [0])
    assert list(folder.glob("*.html"))
