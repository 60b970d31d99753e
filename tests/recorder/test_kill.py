"""A writer that dies at any moment leaves every committed step whole and readable."""

import subprocess
import sys
from pathlib import Path

import pytest

from recorder import NotARecord, open_record, verify
from recorder.testing import scripted_batch

PROGRAM = Path(__file__).parent / "killed_writers.py"


def records_left_by(tmp_path, how):
    subprocess.run([sys.executable, str(PROGRAM), str(tmp_path), how], check=True, timeout=120)
    return sorted(tmp_path.iterdir(), key=lambda path: int(path.name))


def check_whole(folder):
    """Every committed step has the bits that were sent, and `verify` blames nothing but the unfinished steps."""
    record = open_record(folder)
    for step in record.steps:
        for rank in range(record.step(step).manifest.num_ranks):
            batch = scripted_batch([3, 8, 6], seed=100 * step + rank)
            arrays = record.step(step).batch(rank)
            assert arrays["logprobs"].tobytes() == batch["logprobs"][batch["attention_mask"]].tobytes()
            assert record.step(step).outcome(rank).version == step + 1
    report = verify(folder)
    assert report.steps_ok == record.steps
    assert report.steps_missing == record.uncommitted
    return record


def test_a_kill_at_every_call_to_the_disk_loses_no_committed_step(tmp_path):
    seen = set()
    for folder in records_left_by(tmp_path, "stages"):
        if not (folder / "record.json").exists():
            with pytest.raises(NotARecord):
                open_record(folder)
            continue
        record = check_whole(folder)
        seen.add((record.steps, record.uncommitted))
    assert seen == {((), ()), ((), (0,)), ((0,), ()), ((0,), (1,)), ((0, 1), ())}


def test_two_ranks_killed_in_the_middle_of_steps_lose_no_committed_step(tmp_path):
    records = [check_whole(folder) for folder in records_left_by(tmp_path, "times")]
    assert len(records) == 10
    assert all(record.steps == tuple(range(len(record.steps))) and record.steps for record in records)
    assert all(len(record.uncommitted) <= 2 for record in records)
