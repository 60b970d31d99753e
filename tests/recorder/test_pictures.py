"""Pictures of a record: once per content, as long as a step names them, checked on each byte."""

import hashlib
import os

import numpy as np
import pytest
import torch

from recorder import DamagedRecord, Retention, open_record, verify
from recorder.documents import checksummed_bytes, parse_checksummed
from recorder.pictures.shared import SharedPictures, write_pictures
from recorder.resume import resume_record
from recorder.testing import in_step, scripted_batch, send_step, start_facts
from recorder.writer import RecordingOptions, RecordWriter
from replayer.source import recorded_batch
from tests.recorder.pictured import pictured_batch, png, with_pictures, write_pictured_record
from tests.recorder.ranks import begin, on_ranks


def digest(picture):
    return hashlib.sha256(picture).hexdigest()


def stored(record):
    return {path.name: path.read_bytes() for path in (record / "images").iterdir()}


@pytest.fixture
def record(tmp_path):
    write_pictured_record(tmp_path / "record")
    return tmp_path / "record"


def test_pixels_of_a_batch_are_kept_and_padded_as_they_were(tmp_path):
    pixels = np.arange(5 * 4, dtype=np.float32).reshape(5, 4)
    given = in_step(scripted_batch([3, 4], seed=1), 0) | {
        "image_count": np.array([1, 1], np.int32),
        "image_units": np.array([2, 3], np.int32),
        "image_grid_thw": np.array([[1, 1, 2], [1, 1, 3]], np.int64),
        "pixel_values": torch.from_numpy(pixels).to(torch.bfloat16),
    }
    (writer,) = begin(tmp_path / "record")
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
    folder, options = tmp_path / "record", RecordingOptions(queue_steps=2, retention=Retention(keep_last=2))
    writers = begin(folder, 3, options)

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
