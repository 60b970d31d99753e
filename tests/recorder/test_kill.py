"""A writer that dies at any moment leaves every committed step complete, with its pictures."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import recorder.writer
from areal_core.safety.lock import live_holder
from recorder import NotARecord, open_record, verify
from recorder.testing import in_step, scripted_batch
from tests.recorder.killed_writers import NUM_PICTURE_STEPS, PICTURE_OPTIONS, picture_batch, record_pictures

KILLS = int(os.environ.get("AREAL_TEST_KILLS", "500"))
ROOT = Path(__file__).parents[2]


def kill_writers(folder, *how):
    program = [sys.executable, "-m", "tests.recorder.killed_writers"]
    subprocess.run([*program, *map(str, (folder, *how))], check=True, timeout=600, cwd=ROOT)
    return sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: int(path.name))


def check_complete(folder):
    """Check that committed steps have the sent bits.

    `verify` must report only unfinished steps.
    """
    record = open_record(folder)
    for number in record.steps:
        step = record.step(number)
        for rank in range(step.manifest.num_ranks):
            batch = in_step(scripted_batch([3, 8, 6], seed=(2 * number + rank) % 200), number, rank)
            arrays = step.batch(rank)
            assert arrays["logprobs"].tobytes() == batch["logprobs"][batch["attention_mask"]].tobytes()
            assert step.outcome(rank).version == number + 1
    report = verify(folder)
    assert report.steps_ok == record.steps
    assert {problem.kind for problem in report.problems} <= {"unfinished"}
    assert report.steps_missing == record.uncommitted
    return record


def test_a_kill_at_every_call_to_the_disk_loses_no_committed_step(tmp_path):
    seen = set()
    for folder in kill_writers(tmp_path, "stages"):
        if not (folder / "record.json").exists():
            with pytest.raises(NotARecord):
                open_record(folder)
            continue
        record = check_complete(folder)
        seen.add((record.steps, record.uncommitted))
    assert seen == {((), ()), ((), (0,)), ((0,), ()), ((0,), (1,)), ((0, 1), ())}


def check_kills(tmp_path, num_ranks, queue_steps, keep_last, trials):
    """Kill writers at random times; return the number of records with an unfinished step."""
    kill_writers(tmp_path, "times", num_ranks, queue_steps, keep_last, trials)
    num_caught = 0
    assert all(live_holder(tmp_path / str(trial) / "writer.lock") is None for trial in range(trials))
    for trial in range(trials):
        committed = set(map(int, (tmp_path / f"{trial}.committed").read_text().split()))
        if not (tmp_path / str(trial) / "record.json").exists():
            assert not committed
            continue
        record = check_complete(tmp_path / str(trial))
        lost = {step for step in committed - set(record.steps) if record.gaps.reason(step) is None}
        assert not lost
        assert len(record.uncommitted) <= queue_steps + 1
        if keep_last:
            assert len(record.steps) <= keep_last + 1
        num_caught += bool(record.uncommitted)
    return num_caught


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_ranks", "queue_steps", "keep_last"), [(1, 0, 0), (1, 2, 3), (2, 0, 3), (2, 2, 0)]
)
def test_500_kills_lose_no_committed_step(tmp_path, num_ranks, queue_steps, keep_last):
    began = time.monotonic()
    num_caught = check_kills(tmp_path, num_ranks, queue_steps, keep_last, KILLS // 4)
    print(f"{KILLS // 4} kills, {num_caught} in a step, {time.monotonic() - began:.0f} s")
    assert num_caught > KILLS // 40


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.long)])
def test_a_kill_at_a_call_to_the_disk_loses_no_picture_of_a_committed_step(tmp_path, every, monkeypatch):
    monkeypatch.setattr(recorder.writer, "describe_run", recorder.writer.describe_run)  # restored afterwards
    seen = set()
    for folder in kill_writers(tmp_path, "pictures", every):
        if not (folder / "record.json").exists():
            continue
        found = open_record(folder)
        for number in found.steps:
            assert found.step(number).image_data(0).tobytes() == picture_batch(number)["image_data"].tobytes()
        report = verify(folder)
        assert report.steps_ok == found.steps
        assert {problem.kind for problem in report.problems} <= {"unfinished"}
        seen.add(found.steps)
        first = found.steps[-1] + 1 if found.steps else NUM_PICTURE_STEPS
        if first < NUM_PICTURE_STEPS:  # the run goes on from a checkpoint after its last step
            record_pictures(folder, replace(PICTURE_OPTIONS, first_step=first), first)
            assert verify(folder).problems == ()
            assert open_record(folder).steps == (NUM_PICTURE_STEPS - 2, NUM_PICTURE_STEPS - 1)
            assert len(list((folder / "images").iterdir())) == 5  # of the two steps
    assert {(0,), (0, 1), (1, 2)} <= seen
