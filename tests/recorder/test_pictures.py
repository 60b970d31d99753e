"""Pictures of a record: once per content, as long as a step names them, checked on each byte."""

import hashlib
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from recorder import DamagedRecord, RecordError, Retention, open_record, verify
from recorder.archive.extract import extract_record
from recorder.archive.live_archive import LiveArchive
from recorder.archive.pack import archive_record
from recorder.documents import checksummed_bytes, parse_checksummed
from recorder.header import write_header
from recorder.pictures.shared import SharedPictures, write_pictures
from recorder.resume import resume_record
from recorder.testing import (
    SCRIPTED_HEADER,
    gatherers,
    in_step,
    scripted_batch,
    send_step,
    start_facts,
)
from recorder.writer import RecordingOptions, RecordWriter
from replayer.source import recorded_batch
from tests.recorder.pictured import pictured_batch, png, with_pictures, write_pictured_record
from tests.recorder.ranks import on_ranks


def digest(picture):
    return hashlib.sha256(picture).hexdigest()


def stored(record):
    return {path.name: path.read_bytes() for path in (record / "images").iterdir()}


@pytest.fixture
def record(tmp_path):
    write_pictured_record(tmp_path / "record")
    return tmp_path / "record"


def test_each_content_is_stored_once_for_samples_and_steps(record):
    expected = {png(100 * step + prompt) for step in range(3) for prompt in (0, 1)} | {png(9999)}
    assert stored(record) == {digest(picture): picture for picture in expected}
    step = open_record(record).step(1)
    assert step.manifest.format_version == 3
    rows = [[(digest(p), len(p)) for p in (png(100 + prompt), png(9999))] for prompt in (0, 0, 1, 1)]
    assert step.pictures_of_rows(0) == rows
    assert verify(record).problems == ()


def test_the_batch_that_is_read_back_is_the_one_that_was_recorded(record):
    for number in range(3):
        given, found = pictured_batch(number), recorded_batch(open_record(record).step(number), 0)
        assert found.keys() == given.keys()
        for key, array in given.items():
            assert torch.equal(found[key], torch.from_numpy(array)), key


def test_pixels_of_a_batch_are_kept_and_padded_as_they_were(tmp_path):
    pixels = np.arange(5 * 4, dtype=np.float32).reshape(5, 4)
    given = in_step(scripted_batch([3, 4], seed=1), 0) | {
        "image_count": np.array([1, 1], np.int32),
        "image_units": np.array([2, 3], np.int32),
        "image_grid_thw": np.array([[1, 1, 2], [1, 1, 3]], np.int64),
        "pixel_values": torch.from_numpy(pixels).to(torch.bfloat16),
    }
    writer = RecordWriter(tmp_path / "record")
    (tmp_path / "record").mkdir()
    write_header(tmp_path / "record", SCRIPTED_HEADER)
    send_step(writer, 0, given)
    writer("end", steps=1, error=None)
    found = recorded_batch(open_record(tmp_path / "record").step(0), 0)
    assert torch.equal(found["pixel_values"], given["pixel_values"])
    assert found["image_grid_thw"].tolist() == [[1, 1, 2], [1, 1, 3]]
    assert verify(tmp_path / "record").problems == ()


class Halves:
    """A processor that makes two units of each picture: its first bytes as numbers."""

    def units(self, images):
        return [2] * len(images)

    def pixels(self, images):
        values = [list(image[16 : 16 + 4]) for image in images for _ in range(2)]
        return {
            "pixel_values": torch.tensor(values, dtype=torch.float32),
            "image_grid_thw": torch.tensor([[1, 1, 2]] * len(images)),
        }

    def identity(self):
        return {"processor": "Halves", "options": {"size": 2}}


def test_with_the_option_pixels_the_processors_pixels_are_recorded_and_its_identity(tmp_path):
    writer = RecordWriter(tmp_path / "record", options=RecordingOptions(images="pixels"))
    writer("start", **start_facts(), processor=Halves())
    send_step(writer, 0, pictured_batch(0))
    writer("end", steps=1, error=None)
    record = open_record(tmp_path / "record")
    assert record.header.environment["image_processor"] == {"processor": "Halves", "options": {"size": 2}}
    found = recorded_batch(record.step(0), 0)
    pictures = [picture for prompt in (0, 0, 1, 1) for picture in (png(prompt), png(9999))]
    assert torch.equal(found["pixel_values"], Halves().pixels(pictures)["pixel_values"])
    assert found["image_units"].tolist() == [2] * 8
    assert "image_data" not in found
    assert not (tmp_path / "record/images").exists()


@pytest.mark.parametrize("change", ["byte", "shorter", "missing", "renamed"])
def test_a_changed_picture_is_found_by_verify_and_by_every_read(record, change):
    name = digest(png(100))
    file = record / "images" / name
    if change == "missing":
        file.unlink()
    elif change == "renamed":  # the content of another one under this name
        file.write_bytes(png(101))
    else:
        data = bytearray(file.read_bytes())
        data[40] ^= 1
        file.write_bytes(data if change == "byte" else data[:-1])
    report = verify(record)
    assert {(problem.file, problem.kind) for problem in report.problems} == {(f"images/{name}", "damaged")}
    assert report.steps_ok == (0, 2)
    with pytest.raises(DamagedRecord, match=f"images/{name}"):
        open_record(record).step(1).image_data(0)
    assert len(open_record(record).step(0).image_data(0)) == len(pictured_batch(0)["image_data"])


def test_what_is_no_picture_is_foreign_and_a_picture_of_no_step_is_unfinished(record):
    (record / "images/cat.png").write_bytes(png(1))
    (record / "images" / digest(png(77))).write_bytes(png(77))
    (record / "images" / f"{digest(png(78))}.00000.tmp").write_bytes(b"")
    kinds = {problem.file: problem.kind for problem in verify(record).problems}
    assert kinds == {"images/cat.png": "foreign", f"images/{digest(png(77))}": "unfinished"}


def test_a_picture_is_never_read_through_a_link(record, tmp_path):
    file = record / "images" / digest(png(100))
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedRecord, match="link"):
        open_record(record).step(1).image_data(0)


HOSTILE = {
    "no counts": lambda tensors: tensors.pop("image_count"),
    "no names": lambda tensors: tensors.pop("image_sha256"),
    "other axis": lambda tensors: tensors["image_bytes"].update(axis="unit"),
    "unknown axis": lambda tensors: tensors["image_bytes"].update(axis="byte"),
    "short digests": lambda tensors: tensors["image_sha256"].update(shape=[16, 16]),
    "another key": lambda tensors: tensors["rewards"].update(axis="image"),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_entries_that_contradict_are_refused(record, change):
    file = record / "steps/000001/step.json"
    document = parse_checksummed(file.read_bytes(), "step.json")
    (entry,) = document["batches"].values()
    change(entry["tensors"])
    file.write_bytes(checksummed_bytes(document))
    with pytest.raises(DamagedRecord, match=r"step.json"):
        open_record(record).step(1)


def test_counts_that_do_not_add_up_are_refused_when_recording(tmp_path):
    batch = pictured_batch(0)
    for key, values in (("image_count", [1, 1, 1, 1]), ("image_bytes", batch["image_bytes"] - 1)):
        writer = RecordWriter(tmp_path / key)
        (tmp_path / key).mkdir()
        write_header(tmp_path / key, SCRIPTED_HEADER)
        with pytest.raises(RecordError, match="they must agree"):
            send_step(writer, 0, batch | {key: np.array(values, np.int32)})


def test_removing_a_step_removes_the_pictures_that_no_other_step_has(tmp_path):
    options = RecordingOptions(retention=Retention(keep_last=2, pinned=frozenset({0})))
    write_pictured_record(tmp_path / "record", 5, options)
    record = open_record(tmp_path / "record")
    assert record.steps == (0, 3, 4)
    kept = {digest(png(100 * step + prompt)) for step in (0, 3, 4) for prompt in (0, 1)}
    assert stored(tmp_path / "record").keys() == kept | {digest(png(9999))}
    assert verify(tmp_path / "record").problems == ()


def test_the_cap_of_bytes_counts_pictures_once(tmp_path):
    write_pictured_record(tmp_path / "all", 6)
    files = [path for path in (tmp_path / "all").rglob("*") if path.is_file()]
    files = [path for path in files if path.name != "step.json" and path.parent != tmp_path / "all"]
    size = sum(path.stat().st_size for path in files)
    for limit, first in ((size, 0), (size - 1, 1)):
        folder = tmp_path / str(limit)
        write_pictured_record(folder, 6, RecordingOptions(retention=Retention(max_bytes=limit)))
        assert open_record(folder).steps == tuple(range(first, 6))
        assert verify(folder).problems == ()


def test_a_resumed_run_drops_pictures_of_removed_steps_and_of_killed_writers(record):
    (record / "images" / f"{digest(png(78))}.00001.tmp").write_bytes(b"half")
    (record / "images" / digest(png(79))).write_bytes(png(79))
    header = open_record(record).header
    writer = RecordWriter(record, options=RecordingOptions(first_step=2))
    sizes, gaps = resume_record(record, 2, header)
    writer.kept.resume(sizes, gaps)
    kept = {digest(png(100 * step + prompt)) for step in (0, 1) for prompt in (0, 1)} | {digest(png(9999))}
    assert stored(record).keys() == kept


def test_ranks_share_pictures(tmp_path):
    folder, barriers = tmp_path / "record", gatherers(3)
    options = RecordingOptions(queue_steps=2, retention=Retention(keep_last=2))
    writers = [RecordWriter(folder, rank, 3, gather, options) for rank, gather in enumerate(barriers)]
    folder.mkdir()
    write_header(folder, replace(SCRIPTED_HEADER, num_ranks=3, world_size=3))

    def run(rank):
        for step in range(6):  # the same pictures on all ranks, and in every second step
            batch = pictured_batch(step, rank)
            rows = [[png(step % 2 + prompt)] for prompt in (0, 0, 1, 1)]
            send_step(writers[rank], step, batch | with_pictures(batch, rows))
        writers[rank]("end", steps=6, error=None)

    assert on_ranks(3, run) == [None] * 3
    assert [writer.ended for writer in writers] == [None] * 3
    assert verify(folder).problems == ()
    assert open_record(folder).steps == (4, 5)
    kept = {name for name in stored(folder) if not name.endswith(".removed")}
    assert kept == {digest(png(number)) for number in (0, 1, 2)}


def test_a_picture_that_is_removed_while_another_rank_counts_on_it_comes_back(tmp_path):
    """Rank 1 saw it and did not write it; rank 0 has removed the last step with it since then."""
    picture = png(1)
    name, data = digest(picture), memoryview(picture)
    shared = SharedPictures(tmp_path, delay=2)
    write_pictures(tmp_path, 0, {name: data})
    shared.add(0, {name: len(data)})
    write_pictures(tmp_path, 1, {name: data})  # for step 2
    assert shared.drop(0, {name: len(data)}, heir=1) == 0
    assert os.listdir(tmp_path / "images") == [f"{name}.removed"]
    shared.add(1, {})
    shared.check({name: len(data)})
    shared.add(2, {name: len(data)})
    shared.add(3, {})
    shared.add(4, {})
    assert stored(tmp_path) == {name: picture}
    shared.drop(2, {name: len(data)}, heir=4)
    for step in (5, 6):
        shared.add(step, {})
    assert stored(tmp_path) == {}


@pytest.mark.parametrize("name", ["archive.zarr", "archive.zip"])
def test_an_archive_has_each_picture_once_and_restores_the_folder(record, tmp_path, name):
    archived = archive_record(record, tmp_path / name)
    total = sum(path.stat().st_size for path in record.rglob("*") if path.is_file())
    assert archived.source_bytes == total
    assert verify(tmp_path / name).problems == ()
    found = recorded_batch(open_record(tmp_path / name).step(2), 0)
    assert found["image_data"].numpy().tobytes() == pictured_batch(2)["image_data"].tobytes()
    extract_record(tmp_path / name, tmp_path / "again")
    for path in record.rglob("*"):
        if path.is_file():
            assert (tmp_path / "again" / path.relative_to(record)).read_bytes() == path.read_bytes()


def test_an_archive_of_a_record_with_a_changed_picture_is_refused(record, tmp_path):
    (record / "images" / digest(png(100))).write_bytes(png(101))
    with pytest.raises(DamagedRecord, match=r"do not match their sha256|bytes, "):
        archive_record(record, tmp_path / "archive.zarr")


def test_a_run_that_records_into_an_archive_stores_each_picture_once(tmp_path):
    staging, place = tmp_path / "staging", tmp_path / "live.zarr"
    writer = RecordWriter(staging, archive=LiveArchive(staging, str(place)))
    writer("start", **start_facts())
    for step in range(3):
        send_step(writer, step, pictured_batch(step))
        assert os.listdir(staging / "images") == []
        assert (
            open_record(place).step(step).image_data(0).tobytes()
            == pictured_batch(step)["image_data"].tobytes()
        )
    writer("end", steps=3, error=None)
    assert not staging.exists()
    assert verify(place).problems == ()
    extract_record(place, tmp_path / "folder")
    assert len(stored(tmp_path / "folder")) == 7
