"""Beats as files: contents, one file per process, and the cost of a beat."""

import multiprocessing
import time

import pytest

from hangdoctor.heartbeat import VARIABLE, beat, done, observe, read_beats


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
