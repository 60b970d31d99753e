"""Recording into an archive: the same steps as in a folder, readable during and after the run."""

import errno
import itertools
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from recorder import RecordingFailed, commit_anchor, open_record, verify
from recorder.archive.live_archive import LiveArchive
from recorder.testing import scripted_batch, send_step
from recorder.writer import RecordingOptions
from tests.recorder.ranks import begin, on_ranks

URLS = itertools.count()


def record_live(location, staging, num_ranks, queue_steps, num_steps=4, between=lambda step: None):
    """Record scripted steps of several ranks, as the writers of a run do."""
    archive = LiveArchive(staging, str(location))
    options = RecordingOptions(queue_steps=queue_steps)
    writers = begin(staging, num_ranks, options)
    writers[0].archive = archive
    archive.begin()

    def run(rank):
        for step in range(num_steps):
            send_step(writers[rank], step, scripted_batch([3, 8, 5], seed=100 * step + rank))
            if rank == 0:
                between(step)
        writers[rank]("end", steps=num_steps, error=None)

    assert on_ranks(num_ranks, run) == [None] * num_ranks


@pytest.mark.parametrize(("kind", "num_ranks", "queue_steps"), [("folder", 2, 2), ("memory", 1, 0)])
def test_a_live_archive_has_the_same_bytes_as_a_folder(kind, num_ranks, queue_steps, tmp_path):
    location = tmp_path / "live.zarr" if kind == "folder" else f"memory://live{next(URLS)}/a"
    record_live(location, tmp_path / "staging", num_ranks, queue_steps)
    assert not (tmp_path / "staging").exists()
    report = verify(location)
    assert (report.problems, report.steps_ok) == ((), (0, 1, 2, 3))
    record = open_record(location)
    assert record.header.num_ranks == num_ranks
    for step, rank in itertools.product(range(4), range(num_ranks)):
        want = scripted_batch([3, 8, 5], seed=100 * step + rank)
        assert record.step(step).rows(rank, 1)["input_ids"].tolist() == want["input_ids"][1].tolist()
        assert record.step(step).outcome(rank).checksums == {"layer.weight": f"{step:08x}"}


def test_the_archive_can_be_read_while_the_run_continues(tmp_path):
    seen = []

    def look(step):
        record = open_record(tmp_path / "live.zarr")
        seen.append((record.steps, record.step(step).batch(0)["rewards"].tolist()))

    record_live(tmp_path / "live.zarr", tmp_path / "staging", 1, 0, between=look)
    assert [steps for steps, _ in seen] == [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)]
    assert seen[2][1] == scripted_batch([3, 8, 5], seed=200)["rewards"].tolist()


def test_anchors_move_into_the_archive_once(tmp_path):
    staging = tmp_path / "staging"
    weights = np.arange(1000, dtype=np.float32).tobytes()

    def add_anchor(step):
        if step in (0, 1):  # the second time as recovery offers it again
            folder = staging / "anchors" / "000001" / "checkpoint"
            folder.mkdir(parents=True)
            (folder / "weights").write_bytes(weights)
            commit_anchor(folder.parent, 1)

    record_live(tmp_path / "live.zarr", staging, 1, 0, between=add_anchor)
    assert (open_record(tmp_path / "live.zarr").anchor(1) / "checkpoint" / "weights").read_bytes() == weights
    assert verify(tmp_path / "live.zarr").intact


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[2])))
from test_live_archive import record_live
record_live(sys.argv[1], Path(sys.argv[1] + ".recording"), 1, int(sys.argv[3]), 200, lambda step: print(step, flush=True))
"""


@pytest.mark.parametrize(("seen", "queue_steps"), [(3, 2), pytest.param(6, 0, marks=pytest.mark.long)])
def test_a_killed_run_leaves_every_committed_step_complete(seen, queue_steps, tmp_path):
    location = tmp_path / "live.zarr"
    command = [sys.executable, "-c", PROGRAM, str(location), str(Path(__file__).parent), str(queue_steps)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for _ in range(seen):
        line = run.stdout.readline()
    run.send_signal(signal.SIGKILL)
    run.communicate()
    record, report = open_record(location), verify(location)
    assert (report.problems, record.uncommitted) == ((), ())
    assert record.steps == tuple(range(len(record.steps)))
    # without a queue, a step that the training thread has finished is in the archive
    assert len(record.steps) >= (int(line) + 1 if queue_steps == 0 else 0)


@pytest.mark.parametrize("when_failing", ["stop", "continue"])
def test_an_archive_that_cannot_be_finished_ends_the_recording_as_configured(
    tmp_path, when_failing, monkeypatch
):
    def disk_full(archive):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LiveArchive, "end", disk_full)
    staging, notes = tmp_path / "staging", []
    archive = LiveArchive(staging, str(tmp_path / "live.zarr"))
    options = RecordingOptions(when_failing=when_failing)
    (writer,) = begin(staging, options=options, notify=notes.append, archive=archive)
    archive.begin()
    send_step(writer, 0, scripted_batch([3, 8, 5]))
    if when_failing == "stop":
        with pytest.raises(RecordingFailed, match=r"rank 0: OSError:.*No space left"):
            writer("end", steps=1, error=None)
    else:
        writer("end", steps=1, error=None)
        assert "the run continues without recording" in notes[0]
    assert open_record(tmp_path / "live.zarr").steps == (0,)
