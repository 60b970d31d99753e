"""Large inputs are read by several processes: with the same result as by one, and none is lost."""

import gc
import io
import json
import os
import signal
import tarfile
import threading
import time
from pathlib import Path

import pytest

from hangdoctor.diagnose import diagnose
from hangdoctor.model import ProcessDump, Snapshot
from hangdoctor.parse import chunks, forks, location, members
from hangdoctor.parse.read import read_snapshot
from hangdoctor.parse.stacks_json import RECENT, parse_stacks_json

NUM_RANKS = 24


def stacks(rank: int, line: int = 88, thread_id: int = 140_000_000_000_000) -> str:
    """Return what py-spy prints for a rank in an all_reduce."""
    frames = [
        {"name": name, "filename": file, "module": None, "short_filename": file, "line": at, "locals": None}
        for name, file, at in (
            ("all_reduce", "/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3906),
            ("clip", "/job/train.py", line),
            ("<module>", "/job/train.py", 310),
        )
    ]
    return json.dumps(
        [{"pid": 100 + rank, "thread_id": thread_id + rank, "thread_name": "MainThread", "os_thread_id": 100 + rank,
          "active": False, "owns_gil": False, "frames": frames}], indent=2)  # fmt: skip


def write_collection(folder: Path) -> None:
    """Write two samples of a job, with files that are no stacks, damaged or no files."""
    processes = [
        {
            "name": f"rank_{r}",
            "rank": r,
            "role": "trainer",
            "host": "node-1",
            "pid": 100 + r,
            "status": "dumped",
        }
        for r in range(NUM_RANKS)
    ]
    manifest = {
        "format": "hangdoctor-collection",
        "version": 1,
        "world_size": NUM_RANKS,
        "processes": processes,
    }
    for name in ("samples/0", "samples/1", "proc/0", "logs"):
        (folder / name).mkdir(parents=True)
    (folder / "collection.json").write_text(json.dumps(manifest))
    for rank in range(NUM_RANKS):
        for sample in range(2):
            path = folder / f"samples/{sample}/rank_{rank}.json"
            path.write_text(stacks(rank, line=91 if rank == 5 else 88))
        (folder / f"proc/0/rank_{rank}.json").write_text(json.dumps({"state": "S", "cpu_s": rank / 2}))
    (folder / "samples/0/rank_7.json").write_text('[{"pid": 107, "frames": ')
    (folder / "samples/1/rank_8.json").write_text("")
    (folder / "samples/0/rank_9.json").unlink()
    (folder / "samples/0/rank_9.error.txt").write_text(
        "Error: Failed to find python version from target process\n"
    )
    (folder / "samples/1/z.json").symlink_to("rank_0.json")
    (folder / "logs/rank_3.log").write_text("Watchdog caught collective operation timeout\n")


def write_tar(folder: Path, path: Path) -> None:
    """Pack a folder; the header of the last file is of an unusual kind."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for file in sorted(folder.rglob("*")):
            entry = tar.gettarinfo(file, arcname=str(file.relative_to(folder)))
            entry.mtime = 0  # one with a fraction has an unusual header
            with file.open("rb") if entry.isreg() else io.BytesIO() as content:
                tar.addfile(entry, content)
        data = stacks(NUM_RANKS).encode()
        entry = tarfile.TarInfo(f"samples/0/{'x' * 120}_rank_{NUM_RANKS}.json")
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Read by two forks whatever the size; return the processes that were started."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(chunks, "CHUNK_FILES", 5)
    monkeypatch.setattr(chunks, "num_forks", lambda: 2)
    found, start = [], forks.start

    def start_and_note(function, jobs):
        process, results = start(function, jobs)
        found.append(process)
        return process, results

    monkeypatch.setattr(forks, "start", start_and_note)
    return found


def read_by_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> Snapshot:
    """Read without forks."""
    with monkeypatch.context() as patch:
        patch.setattr(chunks, "num_forks", lambda: 1)
        return read_snapshot([path])


def assert_ended(processes: list[int]) -> None:
    """Every one of these children of ours was waited for."""
    for process in processes:
        with pytest.raises(ChildProcessError):
            os.waitpid(process, os.WNOHANG)


@pytest.mark.parametrize("kind", ["folder", "tar", "cut tar", "damaged tar"])
def test_a_large_collection_reads_the_same_by_one_and_by_two_processes(kind, tmp_path, monkeypatch, started):
    write_collection(tmp_path / "job")
    path = tmp_path / "job"
    if kind != "folder":
        path = tmp_path / "job.tar"
        write_tar(tmp_path / "job", path)
    data = bytearray(path.read_bytes()) if path.is_file() else bytearray()
    if kind == "cut tar":
        path.write_bytes(data[: len(data) // 2 + 700])
    if kind == "damaged tar":
        positions, _ = members.tar_positions(path, 4096)
        data[positions[-5] + 3] ^= 1  # the name in a header, whose checksum is now wrong
        path.write_bytes(data)
    alone = read_by_one(path, monkeypatch)
    assert not started
    together = read_snapshot([path])
    assert len(started) == 2
    assert_ended(started)
    assert together == alone
    assert diagnose(together) == diagnose(alone)
    if kind in ("folder", "tar"):
        ranks = {(dump.rank, dump.sample) for dump in together.dumps}
        assert ranks >= {(r, 1) for r in range(NUM_RANKS)} - {(8, 1)}
        assert any("rank_7.json: not JSON" in note for note in together.notes)
    if kind == "tar":
        assert (NUM_RANKS, 0) in ranks
    if kind == "damaged tar":
        assert 0 < len(together.dumps) < 2 * NUM_RANKS - 3


def test_equal_stacks_of_different_chunks_are_one_object(tmp_path, started):
    write_collection(tmp_path / "job")
    dumps = [dump for dump in read_snapshot([tmp_path / "job"]).dumps if dump.rank not in (5, 7, 8, 9)]
    assert len({id(dump.threads) for dump in dumps}) == 1


def test_a_killed_process_loses_nothing(tmp_path, monkeypatch, started):
    write_collection(tmp_path / "job")
    alone = read_by_one(tmp_path / "job", monkeypatch)
    parent, chunk_of, numbers = os.getpid(), chunks.chunk_of, []

    def killed_in_its_second(found, notes):
        numbers.append(None)
        if os.getpid() != parent and len(numbers) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return chunk_of(found, notes)

    monkeypatch.setattr(chunks, "chunk_of", killed_in_its_second)
    assert read_snapshot([tmp_path / "job"]) == alone
    assert len(numbers) > 2  # chunks that this process had to read
    assert_ended(started)


def test_a_small_collection_stays_in_one_process(tmp_path, monkeypatch):
    write_collection(tmp_path / "job")
    write_tar(tmp_path / "job", tmp_path / "job.tar")
    monkeypatch.setattr(chunks, "num_forks", lambda: 2)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a fork for a small input"))
    for path in (tmp_path / "job", tmp_path / "job.tar"):
        assert len(read_snapshot([path]).dumps) >= 2 * NUM_RANKS - 3


def test_results_come_in_the_order_of_the_jobs():
    jobs = list(range(50))
    found = list(forks.forked_map(lambda job: (job, os.getpid()), jobs, 3))
    assert [job for job, _ in found] == jobs
    assert len({process for _, process in found}) == 3
    assert os.getpid() not in {process for _, process in found}


def test_an_error_in_a_job_is_that_of_this_process():
    with pytest.raises(ZeroDivisionError):
        list(forks.forked_map(lambda job: 1 // job, [2, 1, 0, 3], 2))


def test_processes_end_when_their_results_are_not_wanted(started):
    results = forks.forked_map(lambda job: b"x" * (8 << 20), range(20), 2)
    assert len(next(results)) == 8 << 20
    began = time.monotonic()
    results.close()
    assert time.monotonic() - began < 30
    assert len(started) == 2
    assert_ended(started)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_as_before_a_diagnosis(enabled, tmp_path):
    write_collection(tmp_path / "job")
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        diagnose(read_snapshot([tmp_path / "job"]))
        with pytest.raises(ValueError, match="not a folder"):
            read_snapshot([tmp_path / "absent"])
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_no_cycles_are_searched_for_while_many_ranks_are_diagnosed():
    dumps = tuple(
        ProcessDump(f"rank_{rank}", rank, threads=parse_stacks_json(stacks(0))[1]) for rank in range(20_000)
    )
    searches = []
    gc.callbacks.append(lambda phase, details: searches.append(phase))
    try:
        assert len(diagnose(Snapshot(dumps)).ranks) == 20_000
    finally:
        gc.callbacks.pop()
    assert len(searches) <= 2  # the beginning and the end of the one that was due before


def test_no_fork_beside_another_thread():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert forks.num_forks() == 1
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("digits", [1, 5, 15, 18])
def test_numbers_of_any_size_are_cut_out(digits):
    for thread_id in (10 ** (digits - 1), 10**digits - 99):
        pid, (thread,) = parse_stacks_json(stacks(7, thread_id=thread_id))
        assert pid == 107
        assert [frame.line for frame in thread.frames] == [3906, 88, 310]


def test_a_document_of_the_same_size_with_another_line_is_another_stack():
    RECENT.clear()
    for _ in range(2):  # the second time by its layout
        for line in (88, 89):
            _, (thread,) = parse_stacks_json(stacks(7, line=line))
            assert thread.frames[1].line == line
    pid, _ = parse_stacks_json(stacks(7).replace('"pid": 107', '"pid":   7'))
    assert pid is None


@pytest.mark.parametrize(
    "name", ["rank_3.json", "rank_0017.json", "rank_12345678.json", "Rank_3.json", "rank_3.txt"]
)
def test_the_usual_name_means_the_same_as_by_the_rules_of_all_names(name, monkeypatch):
    quick = location.parse_name.__wrapped__(name)
    monkeypatch.setattr(location, "PLAIN", location.re.compile("(?!)"))
    assert location.parse_name.__wrapped__(name) == quick
