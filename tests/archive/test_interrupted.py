"""Archives and extractions that are killed, fail or run at the same time: complete or absent."""

import errno
import fcntl
import os
import signal
import time
from contextlib import suppress

import pytest

from recorder import DamagedRecord, RecordError, commit_anchor, open_record, verify
from recorder.archive.array_streams import ArrayStream
from recorder.archive.extract import extract_record
from recorder.archive.pack import archive_record
from recorder.testing import write_scripted_record
from tests.command_line import invoke
from tests.marks import late

from .test_archive import assert_same_files, files_of


def kill_after(num_steps, call, source, destination):
    """Kill a fork of this process that archives or extracts, after some steps."""
    reading, writing = os.pipe()
    if not (process := os.fork()):
        slow = lambda step: (os.write(writing, b"."), time.sleep(0.3))  # noqa: E731
        with suppress(BaseException):
            call(source, destination, progress=lambda num_steps, work: work(slow))
        os._exit(1)
    os.close(writing)
    for _ in range(num_steps):
        assert os.read(reading, 1)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    os.close(reading)
    unfinished = os.open(destination.with_name(f".{destination.name}.unfinished"), os.O_RDONLY)
    fcntl.flock(unfinished, fcntl.LOCK_EX)  # until its confined child has ended
    os.close(unfinished)


@pytest.fixture
def source(tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=4)
    folder = tmp_path / "record" / "anchors" / "000002"
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "checkpoint" / "weights").write_bytes(os.urandom(1000))
    commit_anchor(folder, 2)
    return tmp_path / "record"


def test_a_killed_extraction_continues(source, tmp_path):
    archive_record(source, tmp_path / "a.zip")
    kill_after(3, extract_record, tmp_path / "a.zip", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert (tmp_path / ".back.unfinished").stat().st_mode & 0o777 == 0o700
    extracted = extract_record(tmp_path / "a.zip", tmp_path / "back")
    assert (extracted.num_steps, extracted.num_continued) == (4, 3)
    assert_same_files(source, tmp_path / "back")
    assert sorted(os.listdir(tmp_path)) == ["a.zip", "back", "record"]


@pytest.mark.long
@pytest.mark.parametrize(("name", "damaged"), [("a.zarr", True), ("a.zip", False)])
def test_an_interrupted_archive_continues(source, tmp_path, monkeypatch, name, damaged):
    weights = source / "anchors/000002/checkpoint/weights"
    weights.write_bytes(os.urandom(40 << 20))  # two full shards, written before the stream is closed
    (source / "anchors/000002/anchor.json").unlink()
    commit_anchor(source / "anchors/000002", 2)
    archive_record(source, tmp_path / "whole.zarr")

    def interrupted(stream):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ArrayStream, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            archive_record(source, tmp_path / name)
    assert not (tmp_path / name).exists()
    left = sorted((tmp_path / f".{name}.unfinished").rglob("c/*"))
    assert [path.name for path in left] == ["0", "1"]
    if damaged:
        left[0].write_bytes(left[0].read_bytes()[: 1 << 20])
    done = invoke("record", "archive", source, "--to", tmp_path / name)
    assert done.exit_code == 0, done.output
    assert f"continued: {1 if damaged else 2} shards" in done.stderr
    if name == "a.zarr":
        assert_same_files(tmp_path / "whole.zarr", tmp_path / name)
    extract_record(tmp_path / name, tmp_path / "back")
    assert_same_files(source, tmp_path / "back")
    assert sorted(os.listdir(tmp_path)) == sorted([name, "back", "record", "whole.zarr"])


@pytest.mark.parametrize("name", [late("a.zip"), "a.zarr"])
def test_a_killed_archive_is_absent_and_the_next_one_clears_what_it_left(source, tmp_path, name):
    kill_after(2, archive_record, source, tmp_path / name)
    assert not (tmp_path / name).exists()
    archive_record(source, tmp_path / name)
    assert verify(tmp_path / name).intact
    assert sorted(os.listdir(tmp_path)) == [name, "record"]


def no_space(descriptor):
    raise OSError(errno.ENOSPC, "full")


@pytest.mark.parametrize("call", [extract_record, archive_record])
def test_a_failing_disk_leaves_nothing(source, tmp_path, monkeypatch, call):
    archive_record(source, tmp_path / "a.zip")
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="full") as error:
        call(tmp_path / "a.zip", tmp_path / "new")
    assert error.value.errno == errno.ENOSPC
    assert sorted(os.listdir(tmp_path)) == ["a.zip", "record"]


def test_an_existing_record_is_replaced_only_by_a_complete_one(source, tmp_path, monkeypatch):
    archive_record(source, tmp_path / "a.zip")
    write_scripted_record(tmp_path / "old", num_steps=1)
    before = {name: (tmp_path / "old" / name).read_bytes() for name in files_of(tmp_path / "old")}
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="full"):
        extract_record(tmp_path / "a.zip", tmp_path / "old", overwrite=True)
    monkeypatch.undo()
    assert {name: (tmp_path / "old" / name).read_bytes() for name in files_of(tmp_path / "old")} == before
    extract_record(tmp_path / "a.zip", tmp_path / "old", overwrite=True)
    assert_same_files(source, tmp_path / "old")


def test_a_damaged_file_ends_an_extraction(source, tmp_path):
    (source / "steps/000001/plan-00000-of-00001.json").write_text("{}")
    with pytest.raises(DamagedRecord, match=r"steps/000001/plan-00000-of-00001\.json"):
        extract_record(source, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    "place", ["note.txt", "record.json", "steps/000001/plan-00000-of-00001.json", "anchors/000002/more"]
)
def test_no_file_that_a_link_names_gets_into_an_archive(source, tmp_path, place):
    (tmp_path / "secret").write_text("TOP-SECRET-OF-THE-USER")
    (source / place).unlink(missing_ok=True)
    (source / place).symlink_to(tmp_path / "secret")
    try:
        archive_record(source, tmp_path / "a")
    except (RecordError, ValueError):
        assert not (tmp_path / "a").exists()
    else:
        assert place in ("note.txt", "anchors/000002/more")  # not part of a record
        extract_record(tmp_path / "a", tmp_path / "back")
        assert place not in files_of(tmp_path / "back")


def test_a_linked_folder_is_not_archived(source, tmp_path):
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").write_text("TOP-SECRET-OF-THE-USER")
    (source / "anchors/000002/linked").symlink_to(tmp_path / "secrets")
    with pytest.raises(DamagedRecord, match="linked: is a link"):
        archive_record(source, tmp_path / "a")
    archive_record(source, tmp_path / "a", skip_damaged=True)
    extract_record(tmp_path / "a", tmp_path / "back")
    assert not any("anchors" in str(name) or "key" in str(name) for name in files_of(tmp_path / "back"))


def test_the_local_copy_of_an_anchor_is_private_and_checked(source, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    archive_record(source, tmp_path / "a.zip")
    place = open_record(tmp_path / "a.zip").anchor(2)
    assert_same_files(source / "anchors/000002", place)
    assert place.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(place.parent) == [place.name]
    place.parent.chmod(0o777)
    with pytest.raises(RecordError, match="others may write into it: set TMPDIR"):
        open_record(tmp_path / "a.zip").anchor(2)
