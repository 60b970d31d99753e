"""Beats, other signs of real processes, and slow or stuck by the clock alone."""

import multiprocessing
import os
import subprocess
import sys
import time

import pytest

from hangdoctor.collect.discover import Search, find_job
from hangdoctor.collect.process import process_table
from hangdoctor.heartbeat import VARIABLE, Beat, beat, done, observe, read_beats
from hangdoctor.watch.liveness import Judgement, Limits, Signs, follow, gpu_watts, judge_liveness, read_signs


def tracks_of(*polls):
    """Return the tracks after polls of the form (now, signs, signs, ...)."""
    tracks = {}
    for now, *seen in polls:
        tracks = follow(tracks, seen, now)
    return tracks


def beating(name, step, alive=True, done=False):
    return Signs(name, alive, step, float(step), done)


def test_silence_is_measured_against_the_longest_pause_between_beats():
    tracks = tracks_of(*((30 * step, beating("rank_0", step)) for step in range(5)))
    assert judge_liveness(tracks, 120 + 149, Limits()) == Judgement("moving", (), 149, 150)
    assert judge_liveness(tracks, 120 + 151, Limits()) == Judgement("quiet", ("rank_0",), 151, 150)


def test_collection_comes_in_time_before_the_watchdog():
    tracks = tracks_of(*((200 * step, beating("rank_0", step)) for step in range(3)))
    assert judge_liveness(tracks, 400 + 301, Limits(watchdog_s=600)) == Judgement(
        "quiet", ("rank_0",), 301, 300
    )


def test_one_silent_rank_among_beating_ones_is_enough():
    tracks = tracks_of(
        (0, beating("rank_0", 0), beating("rank_1", 0)), (8, beating("rank_0", 1), beating("rank_1", 0))
    )
    assert judge_liveness(tracks, 11, Limits(quiet_s=10)) == Judgement("quiet", ("rank_1",), 11, 10)


def test_first_step_gets_half_the_watchdogs_time():
    tracks = tracks_of((0, beating("rank_0", 0)))
    assert judge_liveness(tracks, 299, Limits()) == Judgement("starting", (), 299, 300)
    assert judge_liveness(tracks, 301, Limits()).state == "quiet"
    assert judge_liveness(tracks, 31, Limits(quiet_s=30)).state == "quiet"  # what was asked for holds


def test_without_beats_one_growing_log_is_enough_to_be_alive():
    def look(size):
        return Signs("rank_0", True, log_bytes=size), Signs("rank_1", True, log_bytes=0)

    tracks = tracks_of((0, *look(10)), (50, *look(20)))
    assert judge_liveness(tracks, 55, Limits(quiet_s=10)).state == "moving"
    assert judge_liveness(tracks, 61, Limits(quiet_s=10)).state == "quiet"


def test_cpu_time_counts_only_without_a_better_sign():
    def looks(*signs):
        return judge_liveness(tracks_of(*enumerate_by_ten(signs)), 50, Limits(quiet_s=15)).state

    busy = [Signs("rank_0", True, cpu_s=4.0 * look) for look in range(6)]
    idle = [*busy[:3], *(Signs("rank_0", True, cpu_s=8.1 + 0.3 * look) for look in range(3))]
    spinning = [Signs("rank_0", True, 4, float(min(look, 2)), cpu_s=10.0 * look) for look in range(6)]
    assert looks(*busy) == "moving"
    assert looks(*idle) == "quiet"
    assert looks(*spinning) == "quiet"


def enumerate_by_ten(signs):
    """Return one poll every ten seconds."""
    return [(10 * look, one) for look, one in enumerate(signs)]


def test_gpus_that_draw_the_same_power_are_quiet_though_the_host_spins():
    def looks(*watts):
        signs = [
            Signs("rank_0", True, gpu_watts=drawn, cpu_s=10.0 * look) for look, drawn in enumerate(watts)
        ]
        return judge_liveness(
            tracks_of(*enumerate_by_ten(signs)), 10 * len(watts) - 10, Limits(quiet_s=25)
        ).state

    assert looks(600, 500, 610, 480, 600, 500) == "moving"
    assert looks(600, 500, 121, 122, 121, 120) == "quiet"


def test_job_whose_ranks_are_all_done_is_not_quiet():
    tracks = tracks_of((0, beating("rank_0", 4, done=True)))
    assert judge_liveness(tracks, 1000, Limits(quiet_s=10)).state == "moving"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "beats"))
    monkeypatch.setenv("RANK", "3")
    return tmp_path / "beats"


def test_last_beat_of_each_process_is_read_back(folder):
    before = time.monotonic()
    beat(100)
    beat(7)
    done(5, name="engine_rank_0")
    beats = read_beats(folder)
    assert beats["rank_3"].step == 7
    assert before - 0.001 <= beats["rank_3"].time <= time.monotonic() + 0.001
    assert (beats["engine_rank_0"].step, beats["engine_rank_0"].done) == (5, True)


def test_observer_of_the_training_loop_counts_finished_steps(folder):
    seen = []
    for event, facts in [
        ("start", {"config": {}, "rank": 3}),
        ("batch", {"step": 0}),
        ("step", {"step": 0}),
        ("weights", {"step": 0}),
        ("end", {"steps": 1, "error": None}),
    ]:
        observe(event, **facts)
        seen.append((read_beats(folder)["rank_3"].step, read_beats(folder)["rank_3"].done))
    assert seen == [(0, False), (0, False), (1, False), (1, False), (1, True)]


def test_forked_child_beats_into_a_file_of_its_own_opening(folder):
    beat(1)
    child = multiprocessing.get_context("fork").Process(target=beat, args=(2, "child"))
    child.start()
    child.join()
    assert {name: one.step for name, one in read_beats(folder).items()} == {"rank_3": 1, "child": 2}


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
