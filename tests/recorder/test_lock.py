"""One writer a folder: a second one is refused and named; the lock of a dead one is free."""

import json
import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from areal_core.safety.lock import Held, Lost, live_holder, take
from recorder import RecordingFailed, RecordingOptions, RecordWriter, open_record, verify
from recorder.archive.pack import archive_record
from recorder.errors import RecordInUse
from recorder.header import check_folder
from recorder.lock import writing
from recorder.testing import gatherers, scripted_batch, send_step, start_facts, write_scripted_record
from tests.recorder.ranks import on_ranks

NAMES = {"experiment_name": "gsm8k", "trial_name": "first"}
fork = multiprocessing.get_context("fork")


def started(folder, **options):
    writer = RecordWriter(folder, options=RecordingOptions(**options))
    writer("start", **start_facts(**NAMES))
    return writer


def send(writer, *steps):
    for step in steps:
        send_step(writer, step, scripted_batch([3, 4], seed=step))


def hold(path, ready):
    held = take(path, "run-1", "gsm8k/first")
    ready.set()
    time.sleep(600)
    held.release()


@pytest.fixture
def holder(tmp_path):
    """A live process that holds the lock of `tmp_path/record`."""
    (tmp_path / "record").mkdir()
    ready = fork.Event()
    process = fork.Process(target=hold, args=(tmp_path / "record/writer.lock", ready))
    process.start()
    assert ready.wait(60)
    yield process
    process.kill()
    process.join()


def rewrite(lock: Path, **changes):
    """Change a lock as a process on a machine that does not see it would."""
    lock.write_text(json.dumps(json.loads(lock.read_text()) | changes))


def test_the_second_of_two_writers_built_before_either_starts_is_refused(tmp_path):
    folder = tmp_path / "record"
    first, second = RecordWriter(folder), RecordWriter(folder)
    first("start", **start_facts(**NAMES))
    send(first, 0)
    words = rf"record is being written by run \w+ \(gsm8k/first\), process {os.getpid()} on host .*, since 2.* UTC: choose"
    with pytest.raises(RecordInUse, match=words):
        second("start", **start_facts(**NAMES))
    second("end", steps=0, error="refused")
    send(first, 1)
    first("end", steps=2, error=None)
    assert verify(folder).steps_ok == (0, 1)
    assert sorted(os.listdir(folder)) == ["end.json", "record.json", "steps"]


def start_on_ranks(writers):
    """Send `start` to a writer per rank; return the error of each, or None."""
    num_ranks = len(writers)
    return on_ranks(num_ranks, lambda rank: writers[rank]("start", **start_facts(rank, num_ranks, **NAMES)))


def test_every_rank_of_the_second_run_is_refused_and_every_rank_of_the_first_checks(tmp_path):
    options = RecordingOptions(overwrite=True, queue_steps=1)
    first, second = (
        [RecordWriter(tmp_path, rank, 2, gather, options) for rank, gather in enumerate(gatherers(2))]
        for _ in range(2)
    )
    assert start_on_ranks(first) == [None, None]
    assert [type(error) for error in start_on_ranks(second)] == [RecordInUse, RecordInUse]
    assert [writer.lock_token for writer in first] == [first[0].token] * 2
    for writer in first:
        writer("end", steps=0, error="over")
    assert live_holder(tmp_path / "writer.lock") is not None  # ranks of a failed run may still write


def test_a_writer_whose_lock_was_taken_stops_before_it_commits(tmp_path):
    writer = started(tmp_path)
    send(writer, 0)
    rewrite(tmp_path / "writer.lock", token="other", run="run-2", name="gsm8k/second")
    words = r"writer.lock was taken by run run-2 \(gsm8k/second\).*: step 1 is not committed"
    with pytest.raises(RecordingFailed, match=words):
        send(writer, 1)
    writer("end", steps=1, error="stopped")
    assert open_record(tmp_path).steps == (0,)
    assert json.loads((tmp_path / "writer.lock").read_text())["run"] == "run-2"


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGCONT])
def test_the_lock_of_a_live_or_suspended_process_is_not_taken(tmp_path, holder, number):
    os.kill(holder.pid, number)
    words = rf"run run-1 \(gsm8k/first\), process {holder.pid} on host"
    with pytest.raises(RecordInUse, match=words):
        started(tmp_path / "record")
    with pytest.raises(RecordInUse, match=words):
        check_folder(tmp_path / "record", overwrite=True)
    assert verify_words(tmp_path) == ["record.json"]
    assert str(holder.pid) in verify(tmp_path / "record").written_by


def verify_words(tmp_path):
    (tmp_path / "record/steps").mkdir()
    return [problem.file for problem in verify(tmp_path / "record").problems]


def test_the_lock_of_a_killed_process_is_replaced_and_no_damage(tmp_path, holder):
    holder.kill()
    holder.join()
    check_folder(tmp_path / "record", overwrite=False)
    assert verify_words(tmp_path) == ["record.json"]
    (tmp_path / "record/steps").rmdir()
    writer = started(tmp_path / "record")
    send(writer, 0)
    writer("end", steps=1, error=None)
    assert verify(tmp_path / "record").intact


def test_a_child_that_was_forked_does_not_keep_the_lock_of_its_parent(tmp_path):
    lock, ready = tmp_path / "lock", fork.Queue()

    def parent():
        held = take(lock, "run-1", "")
        child = fork.Process(target=time.sleep, args=(600,))
        child.start()
        held.check()
        ready.put(child.pid)
        ready.close()
        ready.join_thread()
        os.kill(os.getpid(), signal.SIGKILL)

    process = fork.Process(target=parent)
    process.start()
    child = ready.get(timeout=60)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert live_holder(lock) is None
    take(lock, "run-2", "").release()
    os.kill(child, signal.SIGKILL)
    process.join()


def test_a_lock_of_another_machine_is_held_but_by_an_earlier_attempt_of_the_run(tmp_path, holder):
    lock = tmp_path / "record/writer.lock"
    rewrite(lock, host="node7")
    assert "on host node7" in live_holder(lock, "run-2")
    with pytest.raises(Held, match=r"run-1 \(gsm8k/first\), process \d+ on host node7"):
        take(lock, "run-2", "")
    assert live_holder(lock, "run-1") is None
    held = take(lock, "run-1", "gsm8k/first")
    assert json.loads(lock.read_text())["host"] == socket.gethostname()
    held.release()
    assert not lock.exists()


def test_a_file_system_without_locks_stops_the_writer_whose_lock_was_taken(tmp_path, monkeypatch):
    monkeypatch.setattr("areal_core.safety.lock.fcntl.flock", lambda *_: os.fstat(-1))  # an OSError
    first = take(tmp_path / "lock", "run-1", "")
    second = take(tmp_path / "lock", "run-2", "")
    with pytest.raises(Lost, match="was taken by run run-2"):
        first.check()
    first.release()
    second.check()


def contend(lock, begin, results, over, number):
    begin.wait(60)
    try:
        held = take(lock, f"run-{number}", "")
    except Held:
        results.put((number, False))
    else:
        results.put((number, True))
        over.wait(120)
        held.check()


@pytest.mark.parametrize("remains", [None, pytest.param(b"", marks=pytest.mark.long), b"[" * 100_000])
def test_exactly_one_of_eight_contenders_wins(tmp_path, remains):
    lock = tmp_path / "lock"
    if remains is not None:
        lock.write_bytes(remains)
    results, barrier, over = fork.Queue(), fork.Barrier(8), fork.Event()
    processes = [fork.Process(target=contend, args=(lock, barrier, results, over, n)) for n in range(8)]
    for process in processes:
        process.start()
    outcomes = dict(results.get(timeout=120) for _ in processes)
    (winner,) = [number for number, won in outcomes.items() if won]
    assert json.loads(lock.read_text())["run"] == f"run-{winner}"
    over.set()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert not lock.exists()


def test_an_import_a_clearing_and_an_archive_are_refused_where_a_run_writes(tmp_path):
    from areal_debug.train.script_options import clear_for_record
    from recorder.trainers.importing import import_record

    writer = started(tmp_path / "record")
    send(writer, 0)
    write_scripted_record(tmp_path / "other", num_steps=1)
    with pytest.raises(RecordInUse, match="record is being written by run"):
        clear_for_record(tmp_path / "record", tmp_path / "other")
    with pytest.raises(RecordInUse, match="record is being written by run"):
        import_record(tmp_path / "other", tmp_path / "record", overwrite=True)
    with (
        writing(tmp_path / "a.zarr.recording", "live"),
        pytest.raises(RecordInUse, match=r"a.zarr.recording is being written by run \w+ \(live\)"),
    ):
        archive_record(tmp_path / "other", tmp_path / "a.zarr", overwrite=True)
    (tmp_path / "a.zarr.recording").rmdir()
    archive_record(tmp_path / "other", tmp_path / "a.zarr")
    archive_record(tmp_path / "record", tmp_path / "b.zarr")
    assert sorted(os.listdir(tmp_path)) == ["a.zarr", "b.zarr", "other", "record"]
    assert open_record(tmp_path / "b.zarr").storage.names("") == ["record.json", "steps"]
    send(writer, 1)
    assert open_record(tmp_path / "record").steps == (0, 1)
