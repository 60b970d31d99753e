"""Signs of real processes: logs and CPU time by /proc, beats by name, GPU power by nvidia-smi."""

import os
import subprocess
import sys

import pytest

from hangdoctor.collect.discover import Search, find_job
from hangdoctor.collect.process import process_table
from hangdoctor.heartbeat import Beat
from hangdoctor.watch.liveness import Signs, gpu_watts, read_signs

PROGRAM = "import sys, time; print('step 1', flush=True); time.sleep(600)"


@pytest.fixture
def rank(tmp_path):
    """A process whose stdout is a log file of 7 bytes."""
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=log, stderr=subprocess.DEVNULL)
    while (tmp_path / "log").stat().st_size < 7:
        assert process.poll() is None
    yield process
    process.kill()
    process.wait()


def signs_of(rank, beats, watts=None):
    return read_signs(find_job(Search((rank.pid,)), process_table()), beats, watts)


def test_a_log_that_the_watch_itself_writes_is_no_sign(rank, tmp_path, monkeypatch):
    log = os.stat(tmp_path / "log")
    monkeypatch.setattr(os, "fstat", lambda descriptor: log)
    [signs] = signs_of(rank, {}, 300.0)
    assert (signs.log_bytes, signs.gpu_watts) == (None, 300.0)


def test_beat_replaces_them_and_an_engine_that_only_beats_is_seen_too(rank):
    beats = {"rank_0": Beat("rank_0", 4, 9.0, False), "engine_rank_0": Beat("engine_rank_0", 2, 8.0, True)}
    assert signs_of(rank, beats) == [
        Signs("rank_0", True, 4, 9.0),
        Signs("engine_rank_0", True, 2, 8.0, done=True),
    ]


def test_power_of_all_gpus_is_one_number(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\n[ "${1#--query-gpu}" = "$1" ] || printf "0, 9, 100.5\\n1, 9, 20\\n2, 9, [N/A]\\n"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert gpu_watts() == 120.5
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert gpu_watts() is None
