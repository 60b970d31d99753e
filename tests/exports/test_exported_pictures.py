"""Pictures of a record in the tables that exporters write, and given by another trainer."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from recorder import RecordError, open_record, verify
from recorder.tables.formats import export_record
from recorder.trainers.recorder import Recorder
from tests.recorder.pictured import png, write_pictured_record

ROWS = [[png(100 + prompt), png(9999)] for prompt in (0, 0, 1, 1)]


@pytest.fixture
def record(tmp_path):
    write_pictured_record(tmp_path / "record", 2)
    return tmp_path / "record"


def test_pictures_as_files_are_written_once_each(record, tmp_path):
    export_record(record, "jsonl", tmp_path / "x.jsonl", images="files")
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert len(list((tmp_path / "x.jsonl.images").iterdir())) == 5
    for picture, expected in zip(rows[5]["images"], ROWS[1], strict=True):
        assert picture["bytes"] is None
        assert Path(picture["path"]).read_bytes() == expected


def test_a_sample_of_another_trainer_has_its_pictures(tmp_path):
    image = Image.open(io.BytesIO(png(3)))
    samples = [
        {
            "tokens": [1, 2, 3],
            "prompt_length": 2,
            "group": 0,
            "images": [png(1), {"bytes": png(2), "path": None}],
        },
        {"tokens": [1, 2], "prompt_length": 1, "group": 1},
        {"tokens": [1, 5], "prompt_length": 1, "group": 2, "images": [image]},
    ]
    with Recorder(tmp_path / "record", config={}) as recorder:
        recorder.step(0, samples)
    step = open_record(tmp_path / "record").step(0)
    found = [[step.picture(*picture) for picture in row] for row in step.pictures_of_rows(0)]
    assert found[:2] == [[png(1), png(2)], []]
    assert Image.open(io.BytesIO(found[2][0])).tobytes() == image.tobytes()
    assert verify(tmp_path / "record").problems == ()


@pytest.mark.parametrize(
    ("images", "words"),
    [(["x.png"], "image 0 is str"), (b"bytes", "images are bytes"), ([b""], "image 0 is 0 bytes")],
)
def test_what_is_no_picture_is_refused(tmp_path, images, words):
    recorder = Recorder(tmp_path / "record", config={})
    with pytest.raises(RecordError, match=f"step 0, sample 0.*{words}"):
        recorder.step(0, [{"tokens": [1], "images": images}])
    recorder.end()
