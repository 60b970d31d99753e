"""A slow, full or read-only disk: the run does what is configured; committed steps stay intact."""

import errno
import os
import re
import subprocess
import threading
from pathlib import Path

import pytest

import recorder.writer as writer_module
from areal_core.safety import durable
from recorder import (
    Recording,
    RecordingFailed,
    RecordingOptions,
    RecordWriter,
    Retention,
    open_record,
    verify,
)
from recorder.header import write_header
from recorder.testing import SCRIPTED_HEADER, in_step, scripted_batch, send_step
from tests.recorder.ranks import begin, on_ranks

FULL_IN_STEP = 3


def start_writers(folder, num_ranks, messages, **options):
    return begin(folder, num_ranks, RecordingOptions(**options), notify=messages.append)


def run_on_ranks(writers, num_steps, batch):
    """Run steps on every rank, in threads, as a trainer; return the steps and error of each."""
    taken = [0] * len(writers)

    def run(rank):
        error = "the run failed"
        try:
            for step in range(num_steps):
                send_step(writers[rank], step, in_step(batch, step, rank))
                taken[rank] += 1
            error = None
        finally:
            writers[rank]("end", steps=taken[rank], error=error)

    return taken, on_ranks(len(writers), run)


@pytest.fixture
def fill_disk_of(monkeypatch):
    """Fail with "No space left on device" when the rank's batch of a certain step is written."""
    write = durable.write_all

    def fill(folder, rank, num_ranks):
        name = f"batch-{rank:05d}-of-{num_ranks:05d}.safetensors"
        full = folder / "steps" / f"{FULL_IN_STEP:06d}" / name

        def write_all(file, data):
            if Path(file.name) == full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(file, data)

        monkeypatch.setattr(durable, "write_all", write_all)

    return fill


@pytest.mark.parametrize("queue_steps", [0, 2])
@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (0, 2), (1, 2)])
def test_a_full_disk_stops_every_rank_of_the_run_with_the_same_sentence(
    tmp_path, rank, num_ranks, queue_steps, fill_disk_of
):
    messages = []
    writers = start_writers(tmp_path, num_ranks, messages, queue_steps=queue_steps)
    fill_disk_of(tmp_path, rank, num_ranks)
    taken, errors = run_on_ranks(writers, 50, scripted_batch([3, 4]))
    assert all(isinstance(error, RecordingFailed) for error in errors)
    assert {str(error) for error in errors} == {str(errors[0])}
    assert f"failed on rank {rank}: OSError: [Errno 28] No space left on device" in str(errors[0])
    assert "debug.dump_when_failing=continue" in str(errors[0])
    assert max(taken) <= FULL_IN_STEP + queue_steps + 1
    check_readable(tmp_path)


@pytest.mark.parametrize("queue_steps", [0, 2])
@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (1, 2)])
def test_a_run_configured_to_continue_does_so_without_recording_and_reports_it(
    tmp_path, rank, num_ranks, queue_steps, fill_disk_of
):
    messages = []
    writers = start_writers(tmp_path, num_ranks, messages, queue_steps=queue_steps, when_failing="continue")
    fill_disk_of(tmp_path, rank, num_ranks)
    taken, errors = run_on_ranks(writers, 20, scripted_batch([3, 4]))
    assert (taken, errors) == ([20] * num_ranks, [None] * num_ranks)
    assert len(messages) == 2
    assert re.search(r"No space left on device: '.*'; the run continues without recording$", messages[0])
    assert messages[1].startswith("the record is not complete: recording into")
    check_readable(tmp_path)


def check_readable(folder):
    """Assert that all steps before the full disk are present and intact, and later ones are not."""
    record = open_record(folder)
    assert record.steps == tuple(range(FULL_IN_STEP))
    (folder / "steps" / f"{FULL_IN_STEP:06d}").mkdir(exist_ok=True)
    assert {problem.kind for problem in verify(folder).problems} <= {"unfinished"}
    assert record.step(2).outcome(0).version == 3


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB that can be full or read-only; needs permission to mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_floor_keeps_a_small_disk_free_by_removing_the_oldest_steps(small_disk):
    messages = []
    limits = Retention(min_free_bytes=500_000)
    writers = start_writers(small_disk / "record", 1, messages, retention=limits, queue_steps=2)
    taken, errors = run_on_ranks(writers, 30, scripted_batch([2000] * 4))
    assert (taken, errors) == ([30], [None])
    record = open_record(small_disk / "record")
    assert record.steps[-1] == 29
    assert record.gaps.removed == ((0, record.steps[0] - 1),)
    assert verify(small_disk / "record").intact


def test_a_floor_that_removing_cannot_reach_is_a_failure(small_disk):
    (small_disk / "other").write_bytes(bytes(700_000))
    writers = start_writers(small_disk / "record", 1, [], retention=Retention(min_free_bytes=500_000))
    _, (error,) = run_on_ranks(writers, 30, scripted_batch([2000] * 4))
    assert "bytes left, and 500,000 must stay free" in str(error)


def test_a_disk_that_becomes_read_only_leaves_a_readable_record(small_disk):
    messages = []
    (writer,) = start_writers(small_disk / "record", 1, messages, when_failing="continue")
    for step in range(4):
        if step == 2:
            subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        send_step(writer, step, scripted_batch([3, 4], seed=step))
    assert "OSError: [Errno 30] Read-only file system" in messages[0]
    assert open_record(small_disk / "record").steps == (0, 1)
    assert verify(small_disk / "record").intact


class SlowDisk:
    """Each commit waits for the test to release it."""

    def __init__(self, monkeypatch):
        self.may_commit = threading.Semaphore(0)
        commit = writer_module.commit_step

        def slow(*arguments):
            self.may_commit.acquire()
            return commit(*arguments)

        monkeypatch.setattr(writer_module, "commit_step", slow)


def test_a_slow_disk_drops_steps_on_all_ranks_alike_and_the_record_counts_them(tmp_path, monkeypatch):
    disk, messages = SlowDisk(monkeypatch), []
    writers = start_writers(tmp_path, 2, messages, queue_steps=2, when_slow="drop")
    batch, reached = scripted_batch([3, 4]), threading.Barrier(3)

    def run(writer):
        for step in range(6):
            send_step(writer, step, in_step(batch, step, writer.rank))
        reached.wait()
        reached.wait()
        writer("end", steps=6, error=None)

    threads = [threading.Thread(target=run, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    reached.wait()  # no rank has waited for the disk, which has committed nothing yet
    disk.may_commit.release(6)
    reached.wait()
    for thread in threads:
        thread.join(60)
    record = open_record(tmp_path)
    assert record.steps == (0, 1)
    assert record.gaps.dropped == (2, 3, 4, 5)
    assert [writer.dropped for writer in writers] == [[2, 3, 4, 5]] * 2
    assert messages == [
        "the disk is slower than the run: step 2 is dropped, and more may follow",
        "4 steps were dropped because the disk was slower than the run",
    ]
    assert verify(tmp_path).intact


def test_a_slow_disk_makes_the_run_wait_when_nothing_may_be_dropped(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    (writer,) = start_writers(tmp_path, 1, [], queue_steps=2)
    started, waits = [], threading.Event()
    wait = writer.background.wait
    monkeypatch.setattr(writer.background, "wait", lambda timeout_s: waits.set() or wait(timeout_s))

    def run():
        for step in range(5):
            started.append(step)
            send_step(writer, step, scripted_batch([3, 4], seed=step))
        writer("end", steps=5, error=None)

    thread = threading.Thread(target=run)
    thread.start()
    assert waits.wait(60)
    assert started == [0, 1, 2]  # two wait for the disk, the third for a free slot
    disk.may_commit.release(5)
    thread.join(60)
    assert started == [0, 1, 2, 3, 4]
    assert open_record(tmp_path).steps == (0, 1, 2, 3, 4)
    assert open_record(tmp_path).gaps.dropped == ()


def test_a_run_that_dies_does_not_wait_for_ranks_that_are_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "SHUTDOWN_TIMEOUT_S", 0.05)
    messages = []
    options = RecordingOptions(queue_steps=2)
    writer = RecordWriter(tmp_path, 0, 2, lambda state: [state, state], options, messages.append)
    write_header(tmp_path, SCRIPTED_HEADER)
    send_step(writer, 0, scripted_batch([3, 4]))  # rank 1 never writes its files
    writer("end", steps=1, error="KilledElsewhere")
    assert messages == ["rank 0 stopped waiting for the last steps: another rank did not write its files"]
    writer.background.thread.join(10)
    assert open_record(tmp_path).uncommitted == (0,)


def test_a_failing_disk_is_reported_even_when_the_run_fails_for_another_reason(tmp_path, fill_disk_of):
    messages = []
    (writer,) = start_writers(tmp_path, 1, messages, queue_steps=2)
    fill_disk_of(tmp_path, 0, 1)
    for step in range(FULL_IN_STEP + 1):
        send_step(writer, step, scripted_batch([3, 4], seed=step))
    writer("end", steps=FULL_IN_STEP + 1, error="KeyboardInterrupt")
    (message,) = messages
    assert message.startswith("rank 0 could not write the last steps: OSError: [Errno 28] No space left on")


def test_sampled_steps_leave_gaps_that_are_no_damage(tmp_path):
    (writer,) = start_writers(tmp_path, 1, [], recording=Recording("plan", every=3))
    for step in range(8):
        send_step(writer, step, scripted_batch([3], seed=step))
    record = open_record(tmp_path)
    assert record.steps == (0, 3, 6)
    assert verify(tmp_path).intact
    with pytest.raises(ValueError, match="step 4 was not selected for recording"):
        record.step(4)
