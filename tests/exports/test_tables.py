"""Exports read by other libraries: every value, to the bit, and null where nothing is known."""

import json
import shutil
from pathlib import Path

import duckdb
import numpy as np
import pytest
import torch
from pyarrow import dataset, parquet

from recorder import DamagedRecord, RecordExists, open_record
from recorder.tables.formats import export_record
from tests.exports.given import FOREIGN_ROWS, FULL_ROW, recorded_rows


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
