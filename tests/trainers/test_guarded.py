"""A guarded recording ends with its process, whose run it never stops."""

import pytest

from recorder import open_record, verify
from tests.forks import run_anew, run_forked
from tests.marks import late

# a process that never ends its recording: steps, then its end, as the last one is given there
PROGRAM = """
import sys
from recorder.trainers.guarded import Guarded
folder, first, ending = sys.argv[1], int(sys.argv[2]), sys.argv[3]
samples = lambda: [{"tokens": [1, 2], "loss_mask": [0, 1]}]
recording = Guarded("theirs", folder, last=lambda: recording.step(first + 2, samples))
for step in (first, first + 1):
    recording.step(step, samples)
if ending == "raises":
    raise RuntimeError("of the run")
"""


def run(folder, first=0, ending="returns"):
    program = folder.with_name("program.py")
    program.write_text(PROGRAM)
    start = run_anew if ending == "raises" else run_forked  # the end of a fork is not an interpreter's
    return start([str(program), str(folder), str(first), ending])


@pytest.mark.parametrize(("ending", "finished"), [("returns", True), late("raises", False)])
def test_a_recording_ends_with_its_process(tmp_path, ending, finished):
    done = run(tmp_path / "r", ending=ending)
    assert "recording:" not in done.stderr
    assert open_record(tmp_path / "r").steps == (0, 1, 2)
    report = verify(tmp_path / "r")
    assert report.intact
    assert report.end.finished == finished


def test_a_process_continues_the_record_of_the_one_before(tmp_path):
    run(tmp_path / "r")
    done = run(tmp_path / "r", first=2)
    assert done.stderr == ""
    assert open_record(tmp_path / "r").steps == (0, 1, 2, 3, 4)
    report = verify(tmp_path / "r")
    assert report.intact
    assert report.end.finished


def test_a_run_does_not_replace_the_record_of_another(tmp_path):
    run(tmp_path / "r")
    done = run(tmp_path / "r")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"recording: theirs: step 0 is not recorded: {tmp_path / 'r'} already holds a record"
    )
    assert line.endswith("the run continues without recording")
    assert verify(tmp_path / "r").intact
