"""Exports read by other libraries: every value to the bit, null where unknown, and pictures."""

import io
import json
import shutil
from pathlib import Path

import duckdb
import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import dataset, parquet

from recorder import DamagedRecord, RecordError, RecordExists, open_record, verify
from recorder.tables.formats import export_record
from recorder.trainers.recorder import Recorder
from tests.exports.given import FOREIGN_ROWS, FULL_ROW, recorded_rows
from tests.recorder.pictured import png, write_pictured_record


def bits(values) -> bytes:
    """Bytes of float32 values; -0.0 and NaN differ from 0."""
    return np.array(values, np.float32).tobytes()


def check_against_record(rows: list[dict], folder: Path) -> None:
    """Compare rows of an export with the record's own arrays."""
    want = recorded_rows(folder)
    assert len(rows) == len(want) == 16
    for row, arrays in zip(rows, want, strict=True):
        for name in ("step", "rank", "row", "prompt_id", "sample_id"):
            assert row[name] == arrays[name]
        for name, key in {"token_ids": "input_ids", "loss_mask": "loss_mask", "versions": "versions"}.items():
            assert list(row[name]) == arrays[key].tolist()
        assert bits(row["logprobs"]) == arrays["logprobs"].tobytes()
        assert bits([row["reward"]]) == arrays["rewards"].tobytes()
        assert (row["num_tokens"], row["prompt_len"]) == (len(arrays["input_ids"]), 2)
        assert row["finish_reason"] == "stop"
        for name in ("advantages", "prox_logp"):  # position t of the file belongs to token t + 1
            assert row[name][0] is None
            assert bits(row[name][1:]) == arrays[name][:-1].tobytes()
        assert list(row["micro_batches"]) == [
            {"minibatch": 0, "micro_batch": 0, "num_tokens": 21, "loss": 0.5 + row["step"], "weight": 4.0}
        ]


def test_a_parquet_file_holds_every_value_of_a_full_record(full, tmp_path):
    export_record(full, "parquet", tmp_path / "out.parquet")
    file = parquet.ParquetFile(tmp_path / "out.parquet", page_checksum_verification=True)
    check_against_record(file.read().to_pylist(), full)
    names = [row[0] for row in duckdb.sql(f"describe '{tmp_path}/out.parquet'").fetchall()]
    rows = duckdb.sql(f"from '{tmp_path}/out.parquet'").fetchall()
    check_against_record([dict(zip(names, row, strict=True)) for row in rows], full)


def check_foreign(rows: list[dict]) -> None:
    """Compare rows with what was given to the recorder."""
    assert [{name: row[name] for name in FULL_ROW} for row in rows] == FOREIGN_ROWS
    assert [row["step"] for row in rows] == [0, 0, 0, 0, 1]
    assert [row["prompt_id"] is None for row in rows] == [False, True, True, True, True]


@pytest.mark.parametrize("name", ["out.parquet", "table", "out.jsonl"])
def test_what_is_not_known_is_null(foreign, tmp_path, name):
    place = tmp_path / name
    export_record(foreign, "jsonl" if name == "out.jsonl" else "parquet", place)
    if name == "out.jsonl":
        check_foreign([json.loads(line) for line in place.read_text().split("\n")[:-1]])
    elif place.is_dir():
        check_foreign(dataset.dataset(place, partitioning="hive").to_table().to_pylist())
    else:
        check_foreign(parquet.read_table(place).to_pylist())
        nulls = duckdb.sql(f"select count(*) - count(logprobs), count(*) - count(reward) from '{place}'")
        assert nulls.fetchall() == [(3, 4)]


def test_pt_keeps_what_stands_for_the_unknown_and_says_what_is(foreign, tmp_path):
    export_record(foreign, "pt", tmp_path / "0.pt", step=0)
    batch = torch.load(tmp_path / "0.pt", weights_only=True)
    assert batch["unknown"].tolist() == [0, 254, 8 + 16 + 32, 255]  # versions, reward, prompt
    assert batch["rewards"].isnan().tolist() == [False, True, True, True]
    assert batch["logprobs"][0].tolist() == [0, 0, -0.5, -9, -1.5]
    assert batch["logprobs"][1, :4].isnan().all()
    assert batch["attention_mask"].sum(1).tolist() == [5, 4, 3, 0]


def test_only_the_tensors_of_the_columns_are_read(full, tmp_path):
    copy = tmp_path / "record"
    shutil.copytree(full, copy)
    file = next((copy / "steps/000001").glob("learning-00001-*"))
    file.write_bytes(file.read_bytes()[:-1])
    record = open_record(copy)
    assert len(record.to_arrow(columns=["reward", "logprobs"])) == 16
    with pytest.raises(DamagedRecord, match="learning-00001-of-00002"):
        record.to_arrow(columns=["advantages"])


def test_no_folder_but_an_earlier_export_is_replaced(full, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    for name in ("parquet", "hf"):
        with pytest.raises(RecordExists, match="--force"):
            export_record(full, name, tmp_path / "mine")
        with pytest.raises(RecordExists, match="no earlier export"):
            export_record(full, name, tmp_path / "mine", overwrite=True)
        export_record(full, name, tmp_path / name)
        export_record(full, name, tmp_path / name, step=1, overwrite=True)
    assert [path.name for path in (tmp_path / "parquet").iterdir()] == ["step=1"]
    assert (tmp_path / "mine/notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mine", "parquet"]


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
