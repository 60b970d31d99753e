"""Exports read by other libraries: every value, to the bit, and null where nothing is known."""

import json
import shutil
from pathlib import Path

import duckdb
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from pyarrow import dataset, parquet

from areal_debug import Recorder
from areal_debug.cli import main
from recorder import DamagedRecord, RecordExists, open_record
from recorder.tables.formats import export_record
from tests.exports.given import (
    FOREIGN_ROWS,
    FULL_ROW,
    recorded_rows,
    write_foreign_record,
    write_full_record,
)


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    return write_full_record(tmp_path_factory.mktemp("full") / "record")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> Path:
    return write_foreign_record(tmp_path_factory.mktemp("foreign") / "record")


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


def test_jsonl_and_arrow_hold_the_same(full, tmp_path):
    export_record(full, "jsonl", tmp_path / "out.jsonl")
    check_against_record(
        [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().split("\n")[:-1]], full
    )
    check_against_record(open_record(full).to_arrow().to_pylist(), full)


def test_a_line_of_json_is_one_line_and_keeps_infinite_numbers(tmp_path):
    texts = ["\u2028é", "plain"]
    with Recorder(tmp_path / "record") as recorder:
        for step, (text, number) in enumerate(zip(texts, (0.5, float("inf")), strict=True)):
            recorder.step(step, [{"prompt": "?", "completion": text, "reward": number}])
    export_record(tmp_path / "record", "jsonl", tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["completion"] for row in rows] == texts
    assert [row["reward"] for row in rows] == [0.5, {"float": "inf"}]


def test_a_folder_is_one_table_of_steps_for_every_reader(full, tmp_path):
    exported = export_record(full, "parquet", tmp_path / "table")
    assert exported.files == tuple(f"{tmp_path}/table/step={step}/part-0.parquet" for step in (0, 1))
    assert "step" not in parquet.ParquetFile(exported.files[0]).schema_arrow.names
    table = dataset.dataset(tmp_path / "table", partitioning="hive").to_table()
    check_against_record(table.to_pylist(), full)
    source = f"read_parquet('{tmp_path}/table/*/*.parquet')"
    assert duckdb.sql(
        f"select typeof(step), count(*) from {source} where step = 1 group by 1"
    ).fetchall() == [("BIGINT", 8)]
    names = [row[0] for row in duckdb.sql(f"describe from {source}").fetchall()]
    rows = duckdb.sql(f"from {source} order by step, rank, row").fetchall()
    check_against_record([dict(zip(names, row, strict=True)) for row in rows], full)


def test_datasets_opens_the_saved_folder(full, foreign, tmp_path):
    from datasets import load_from_disk

    export_record(full, "hf", tmp_path / "full")
    check_against_record(load_from_disk(str(tmp_path / "full")).to_list(), full)
    export_record(foreign, "hf", tmp_path / "foreign")
    check_foreign(load_from_disk(str(tmp_path / "foreign")).to_list())


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


def test_slime_gets_none_for_what_is_not_known(foreign, tmp_path):
    export_record(foreign, "slime", tmp_path / "0.pt", step=0)
    samples = torch.load(tmp_path / "0.pt", weights_only=True)["samples"]
    full, bare, gaps, text = samples
    assert (full["tokens"], full["response_length"], full["status"]) == ([5, 6, 7, 8, 9], 3, "truncated")
    assert (full["loss_mask"], full["rollout_log_probs"]) == ([1, 0, 1], [-0.5, -9.0, -1.5])
    assert full["weight_versions"] == ["3"]
    unknown = ("group_index", "reward", "loss_mask", "rollout_log_probs")
    assert [bare[name] for name in unknown] == [None] * 4
    assert (bare["status"], bare["weight_versions"]) == ("pending", [])
    assert gaps["rollout_log_probs"] == [None, -0.5]
    assert (text["tokens"], text["response"]) == ([], "c\u2028d")


def test_a_data_frame_keeps_integers_that_are_null(foreign):
    frame = open_record(foreign).to_pandas(steps=[0], columns=["reward", "prompt_len", "token_ids"])
    assert list(frame.columns) == ["reward", "prompt_len", "token_ids"]
    assert frame["prompt_len"].dtype == "Int32"
    assert frame["prompt_len"].tolist()[0::2] == [2, 1]
    assert frame["prompt_len"].isna().tolist() == [False, True, False, True]
    assert frame["token_ids"][0].tolist() == [5, 6, 7, 8, 9]


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


@pytest.mark.parametrize("name", ["hf", "parquet"])
def test_the_verb_writes_folders(foreign, tmp_path, name):
    arguments = ["record", "export", str(foreign), "--format", name, "--to", str(tmp_path / "out")]
    done = CliRunner().invoke(main, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert (facts["steps"], facts["lost"]) == ([0, 1], ["plans, statistics, checksums and anchors"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    done = CliRunner().invoke(main, arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "exists already" in done.stderr
