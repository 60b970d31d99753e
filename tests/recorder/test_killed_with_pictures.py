"""A writer of pictures that dies at any call to the disk leaves a record that a run continues."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import recorder.writer
from recorder import open_record, verify
from tests.recorder.killed_picture_writers import NUM_STEPS, OPTIONS, batch_of, record

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.long)])
def test_a_kill_at_a_call_to_the_disk_loses_no_picture_of_a_committed_step(tmp_path, every, monkeypatch):
    monkeypatch.setattr(recorder.writer, "describe_run", recorder.writer.describe_run)  # restored afterwards
    program = [sys.executable, "-m", "tests.recorder.killed_picture_writers"]
    subprocess.run([*program, str(tmp_path), str(every)], check=True, timeout=600, cwd=ROOT)
    seen = set()
    for folder in tmp_path.iterdir():
        if not (folder / "record.json").exists():
            continue
        found = open_record(folder)
        for number in found.steps:
            assert found.step(number).image_data(0).tobytes() == batch_of(number)["image_data"].tobytes()
        report = verify(folder)
        assert report.steps_ok == found.steps
        assert {problem.kind for problem in report.problems} <= {"unfinished"}
        seen.add(found.steps)
        first = found.steps[-1] + 1 if found.steps else NUM_STEPS
        if first < NUM_STEPS:  # the run goes on from a checkpoint after its last step
            record(folder, replace(OPTIONS, first_step=first), first)
            assert verify(folder).problems == ()
            assert open_record(folder).steps == (NUM_STEPS - 2, NUM_STEPS - 1)
            assert len(list((folder / "images").iterdir())) == 5  # of the two steps
    assert {(0,), (0, 1), (1, 2)} <= seen
