"""A record in a zarr store is the same record: same bytes, same answers, same complaints."""

import filecmp
import itertools
import json
import zipfile
from functools import partial

import numpy as np
import pytest
import zarr

from recorder import (
    DamagedRecord,
    NotARecord,
    RecordError,
    RecordExists,
    RecordNotFound,
    StepNotRecorded,
    UnknownFormat,
    commit_anchor,
    open_record,
    verify,
)
from recorder.archive.extract import extract_record
from recorder.archive.pack import archive_record
from recorder.testing import write_scripted_record
from tests.command_line import printed

URLS = itertools.count()


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def assert_same_files(one, other):
    assert files_of(one) == files_of(other)
    for name in files_of(one):
        assert filecmp.cmp(one / name, other / name, shallow=False), name


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Three steps of two ranks and an anchor with a file in a folder."""
    folder = tmp_path_factory.mktemp("source") / "record"
    write_scripted_record(folder, num_steps=3, num_ranks=2)
    anchor = folder / "anchors" / "000002"
    (anchor / "checkpoint").mkdir(parents=True)
    (anchor / "checkpoint" / "weights.bin").write_bytes(np.arange(70_000, dtype=np.float32).tobytes())
    commit_anchor(anchor, step=2)
    return folder


@pytest.fixture(scope="module", params=["folder", "zip", "memory"])
def archive(request, source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("archive")
    place = {"folder": folder / "a.zarr", "zip": folder / "a.zip", "memory": f"memory://bucket{next(URLS)}/a"}
    return archive_record(source, place[request.param]).location


def test_every_storage_reads_the_same_as_the_folder(source, archive):
    one, other = open_record(source), open_record(archive)
    assert (one.header, one.steps, one.anchors()) == (other.header, other.steps, other.anchors())
    for step, rank in itertools.product(one.steps, (0, 1)):
        ours, theirs = one.step(step), other.step(step)
        assert ours.manifest == theirs.manifest
        assert (ours.plan(rank), ours.outcome(rank)) == (theirs.plan(rank), theirs.outcome(rank))
        arrays = theirs.batch(rank)
        for key, array in ours.batch(rank).items():
            assert (arrays[key].dtype, arrays[key].tobytes()) == (array.dtype, array.tobytes())
            assert arrays[key].flags.writeable  # torch warns of tensors that are not
        assert ours.rows(rank, 1)["input_ids"].tolist() == theirs.rows(rank, 1)["input_ids"].tolist()


def test_extracting_restores_every_file_bit_for_bit(source, archive, tmp_path):
    extract_record(archive, tmp_path / "back")
    assert_same_files(source, tmp_path / "back")


def test_an_anchor_comes_to_this_machine_as_a_folder(source, archive):
    folder = open_record(archive).anchor(2)
    assert_same_files(source / "anchors" / "000002", folder)
    assert open_record(archive).anchor(2) == folder
    with pytest.raises(StepNotRecorded, match="no anchor at step 1"):
        open_record(archive).anchor(1)


def test_every_flipped_byte_of_an_archive_is_found_and_none_is_read(tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=2)
    archive_record(tmp_path / "record", tmp_path / "a")
    wanted = {step: open_record(tmp_path / "a").step(step).batch(0) for step in (0, 1)}
    rng = np.random.default_rng(0)
    files = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    unnoticed = []
    for number in range(40):
        path = files[number % len(files)]
        before = path.read_bytes()
        after = bytearray(before)
        after[rng.integers(len(after))] ^= 1 << rng.integers(8)
        path.write_bytes(after)
        try:
            found = bool(verify(tmp_path / "a").problems)
            if not found:  # then it must have been a byte without meaning, such as padding of zarr's JSON
                record = open_record(tmp_path / "a")
                same = all(
                    array.tobytes() == wanted[step][key].tobytes()
                    for step in (0, 1)
                    for key, array in record.step(step).batch(0).items()
                )
                unnoticed += [] if same and path.name == "zarr.json" else [path]
        except ValueError:
            pass  # the store cannot be opened any more, and reports it
        path.write_bytes(before)
    assert unnoticed == []


def test_what_cannot_be_opened_is_reported(tmp_path, source):
    with pytest.raises(RecordNotFound, match="missing"):
        open_record(tmp_path / "missing")
    with pytest.raises(RecordNotFound, match="nosuch"):
        open_record("nosuch://bucket/a")
    with pytest.raises(RecordError, match=r"nosuch://bucket/a cannot be reached"):
        archive_record(source, "nosuch://bucket/a")
    with pytest.raises(RecordNotFound, match="memory://empty"):
        open_record("memory://empty/a")
    (tmp_path / "file").write_text("text")
    with pytest.raises(RecordNotFound, match="is a file"):
        open_record(tmp_path / "file")
    zarr.open_group(tmp_path / "foreign", mode="w")
    with pytest.raises(NotARecord, match="not a finished archive"):
        open_record(tmp_path / "foreign")
    for name, words in ((".zgroup", "zarr v2"), ("record/record.json", "no zarr.json: unpack it")):
        with zipfile.ZipFile(tmp_path / "other.zip", "w") as file:
            file.writestr(name, "{}")
        with pytest.raises(NotARecord, match=words):
            open_record(tmp_path / "other.zip")
    archive_record(source, tmp_path / "cut.zip")
    (tmp_path / "cut.zip").write_bytes((tmp_path / "cut.zip").read_bytes()[:1000])
    with pytest.raises(DamagedRecord, match="cut off after 1000 bytes"):
        open_record(tmp_path / "cut.zip")
    archive_record(source, tmp_path / "newer")
    zarr.open_group(tmp_path / "newer", mode="r+").attrs["areal_debug_archive"] = 99
    with pytest.raises(UnknownFormat, match="99"):
        open_record(tmp_path / "newer")


def test_an_error_that_only_the_store_knows_is_one_sentence(monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    def fails(*arguments, **options):
        raise RuntimeError("no credentials")

    monkeypatch.setattr(MemoryFileSystem, "info", fails)
    with pytest.raises(DamagedRecord, match="RuntimeError: no credentials"):
        open_record("memory://bucket/a")


def test_an_archive_replaces_nothing_unless_requested_and_then_only_an_archive(source, tmp_path):
    archive_record(source, tmp_path / "a")
    with pytest.raises(RecordExists, match="--force"):
        archive_record(source, tmp_path / "a")
    archive_record(source, tmp_path / "a", overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    with pytest.raises(RecordExists):
        archive_record(source, tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "notes").read_text() == "keep"


def test_the_verbs_archive_list_and_extract(source, tmp_path):
    run = partial(printed, "record")
    assert "3 steps" in run("archive", source, "--to", tmp_path / "a.zip")
    facts = json.loads(run("archive", source, "--to", f"memory://b{next(URLS)}/c", "--json"))
    assert facts["num_steps"] == 3
    assert "3 steps" in run("ls", tmp_path / "a.zip")
    assert "3 steps" in run("ls", facts["location"])
    assert "intact" in run("verify", facts["location"])
    assert "prompt 100000, sample 0" in run("show", facts["location"], "--step", "1")
    run("extract", tmp_path / "a.zip", "--to", tmp_path / "back")
    assert_same_files(source, tmp_path / "back")
    assert "exists already" in run("extract", tmp_path / "a.zip", "--to", tmp_path / "back", code=2)
    (tmp_path / "back" / "record.json").write_text("{}")
    run("extract", tmp_path / "a.zip", "--to", tmp_path / "back", "--force")
    assert_same_files(source, tmp_path / "back")
    assert "exists already" in run("archive", source, "--to", tmp_path / "a.zip", code=2)
    assert "does not exist" in run("archive", tmp_path / "missing", "--to", tmp_path / "b", code=2)
