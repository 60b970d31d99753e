"""One writer a folder: a second one is refused and named; a dead one is recognised and replaced."""

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from areal_core.safety import lock as protocol
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
LONG = pytest.mark.long
ELSEWHERE = [{"place": "another boot pid:[1]", "pid": 7, "started": 1}]


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


def rewrite(lock: Path, silent_s: float = 0.0, **changes):
    """Change a lock as if another process had written it, `silent_s` seconds ago."""
    lock.write_text(json.dumps(json.loads(lock.read_text()) | changes))
    os.utime(lock, (time.time() - silent_s,) * 2)


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
    assert len(json.loads((tmp_path / "writer.lock").read_text())["processes"]) == 2
    assert [writer.lock_token for writer in first] == [first[0].token] * 2
    for writer in first:
        writer("end", steps=0, error="over")
    assert (tmp_path / "writer.lock").exists()  # ranks of a failed run may still write


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
    os.utime(tmp_path / "record/writer.lock", (0, 0))  # on this machine no heartbeat is needed
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
    deadline = time.monotonic() + 60
    while protocol._start_time(holder.pid) is not None:  # a zombie until it is joined
        assert time.monotonic() < deadline
        time.sleep(0.01)
    check_folder(tmp_path / "record", overwrite=False)
    assert verify_words(tmp_path) == ["record.json"]
    (tmp_path / "record/steps").rmdir()
    writer = started(tmp_path / "record")
    send(writer, 0)
    writer("end", steps=1, error=None)
    assert verify(tmp_path / "record").intact


def test_a_reused_pid_is_another_process(tmp_path):
    take(tmp_path / "lock", "run-1", "").leave()
    here = json.loads((tmp_path / "lock").read_text())["processes"]
    assert live_holder(tmp_path / "lock") is not None
    rewrite(tmp_path / "lock", processes=[here[0] | {"started": here[0]["started"] - 1}])
    assert live_holder(tmp_path / "lock") is None


def test_a_lock_with_one_live_rank_is_held(tmp_path, holder):
    lock = tmp_path / "record/writer.lock"
    (alive,) = json.loads(lock.read_text())["processes"]
    rewrite(lock, processes=[alive | {"pid": 2**22 - 1}, alive])
    with pytest.raises(Held):
        take(lock, "run-2", "")


@pytest.fixture
def fast_watch(monkeypatch):
    monkeypatch.setattr(protocol, "WATCH_S", 0.5)


def test_a_holder_elsewhere_is_dead_when_its_heartbeat_has_stopped(tmp_path, fast_watch):
    lock = tmp_path / "lock"
    take(lock, "run-1", "gsm8k").leave()
    rewrite(lock, protocol.STALE_S - 30, processes=ELSEWHERE, host="node7")
    with pytest.raises(Held, match=r"process 7 on host node7.*last heartbeat was 27\d s ago, after 300 s"):
        take(lock, "run-2", "")
    rewrite(lock, protocol.STALE_S + 30)
    began = time.monotonic()
    taken = take(lock, "run-2", "")
    assert time.monotonic() - began >= 0.5
    taken.check()
    assert live_holder(lock) is not None


def test_a_heartbeat_that_continues_while_it_is_watched_keeps_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "WATCH_S", 20.0)
    lock = tmp_path / "lock"
    take(lock, "run-1", "").leave()
    rewrite(lock, protocol.STALE_S + 30, processes=ELSEWHERE)
    threading.Timer(0.5, os.utime, [lock]).start()
    with pytest.raises(Held):
        take(lock, "run-2", "")


def test_the_holder_beats_until_its_lock_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "HEARTBEAT_S", 0.01)
    lock = tmp_path / "lock"
    held = take(lock, "run-1", "")
    os.utime(lock, (0, 0))
    deadline = time.monotonic() + 30
    while lock.stat().st_mtime == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rewrite(lock, token="other")
    with pytest.raises(Lost):
        held.check()
    time.sleep(0.1)
    os.utime(lock, (0, 0))
    time.sleep(0.1)
    assert lock.stat().st_mtime == 0
    held.release()
    assert lock.exists()  # it is not ours


def contend(lock, begin, results, number):
    begin.wait(60)
    try:
        held = take(lock, f"run-{number}", "")
    except Held:
        results.put((number, False))
    else:
        results.put((number, True))
        time.sleep(1.0)
        held.check()


@pytest.mark.parametrize(
    "remains",
    [
        "a dead lock",
        *(pytest.param(name, marks=LONG) for name in ("nothing", "a dead claim", "an empty lock")),
    ],
)
def test_exactly_one_of_eight_contenders_wins(tmp_path, remains, fast_watch):
    lock = tmp_path / "lock"
    if remains != "nothing":
        take(lock, "run-0", "").leave()
        gone = json.loads(lock.read_text())["processes"][0] | {"pid": 2**22 - 1}
        rewrite(lock, processes=[gone])
    if remains == "a dead claim":  # killed between claim and rename
        claim = tmp_path / f"lock.{protocol._read(lock).digest}"
        claim.write_text(lock.read_text())
    if remains == "an empty lock":  # killed on a file system without links
        lock.write_text("")
        os.utime(lock, (0, 0))
    results, barrier = fork.Queue(), fork.Barrier(8)
    processes = [fork.Process(target=contend, args=(lock, barrier, results, number)) for number in range(8)]
    for process in processes:
        process.start()
    outcomes = dict(results.get(timeout=120) for _ in processes)
    (winner,) = [number for number, won in outcomes.items() if won]
    assert json.loads(lock.read_text())["run"] == f"run-{winner}"
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert os.listdir(tmp_path) in (["lock"], [])


def test_a_lock_that_is_no_lock_is_held_until_it_is_old(tmp_path, fast_watch):
    lock = tmp_path / "lock"
    for data in (b"", b"[]", b'{"processes": 3}', b"[" * 100_000, b"\xff"):
        lock.write_bytes(data)
        with pytest.raises(Held, match="an unknown process"):
            take(lock, "run-2", "")


def test_a_killed_run_resumes_its_record(tmp_path, holder):
    folder = tmp_path / "record"
    holder.kill()
    holder.join()
    first = started(folder)
    send(first, 0, 1)
    first.lock.leave()  # as after SIGKILL, but for the process, which lives
    rewrite(
        folder / "writer.lock",
        processes=[json.loads((folder / "writer.lock").read_text())["processes"][0] | {"pid": 2**22 - 1}],
    )
    again = started(folder, first_step=1)
    send(again, 1, 2)
    again("end", steps=3, error=None)
    assert verify(folder).steps_ok == (0, 1, 2)
    assert verify(folder).intact


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
