"""Records as files of other tools, read by their own libraries to the same values."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from pyarrow import parquet

from areal_debug.cli import main
from recorder import RecordError, RecordExists, StepNotRecorded, open_record
from recorder.exporters.exporting import export_record
from recorder.testing import write_scripted_record
from recorder.trainers.importing import import_record


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> Path:
    """Two steps of two ranks."""
    folder = tmp_path_factory.mktemp("record") / "record"
    write_scripted_record(folder, num_steps=2, num_ranks=2)
    return folder


def rows(record, steps=(0, 1)):
    """All rows in the order of an export."""
    opened = open_record(record)
    return [
        opened.step(step).rows(rank, row)
        for step in steps
        for rank in (0, 1)
        for row in range(opened.step(step).num_rows(rank))
    ]


def test_jsonl_holds_a_sample_a_line_with_exact_numbers(record, tmp_path):
    exported = export_record(record, "jsonl", tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(lines) == len(rows(record)) == 16
    for line, row in zip(lines, rows(record), strict=True):
        assert line["token_ids"] == row["input_ids"].tolist()
        assert np.array(line["logprobs"], np.float32).tobytes() == row["logprobs"].tobytes()
        assert (line["loss_mask"], line["versions"]) == (row["loss_mask"].tolist(), row["versions"].tolist())
        assert (line["prompt_id"], line["sample_id"]) == (row["prompt_id"], row["sample_id"])
        assert (line["reward"], line["finish_reason"]) == (row["rewards"], "stop")
    assert [line["step"] for line in lines] == [0] * 8 + [1] * 8
    assert lines[0]["prompt_len"] == 2
    assert exported.lost == ("plans, statistics, checksums and anchors",)


def test_parquet_reads_back_with_checksums_checked(record, tmp_path):
    export_record(record, "parquet", tmp_path / "out.parquet")
    table = parquet.ParquetFile(tmp_path / "out.parquet", page_checksum_verification=True).read().to_pydict()
    want = rows(record)
    assert [list(ids) for ids in table["token_ids"]] == [row["input_ids"].tolist() for row in want]
    got = np.concatenate([np.array(values, np.float32) for values in table["logprobs"]])
    assert got.tobytes() == np.concatenate([row["logprobs"] for row in want]).tobytes()
    assert "prompt" not in table  # no text was recorded


def test_pt_is_a_padded_batch_that_loads_with_weights_only(record, tmp_path):
    export_record(record, "pt", tmp_path / "step-{step}.pt")
    batch = torch.load(tmp_path / "step-1.pt", weights_only=True)
    want = rows(record, [1])
    lengths = batch["attention_mask"].sum(1)
    assert lengths.tolist() == [len(row["input_ids"]) for row in want]
    for number, row in enumerate(want):
        for key in ("input_ids", "loss_mask", "logprobs", "versions"):
            assert batch[key][number, : lengths[number]].numpy().tobytes() == row[key].tobytes()
            assert batch[key][number, lengths[number] :].abs().sum() == 0
    assert {key: str(value.dtype) for key, value in batch.items()} == {
        "attention_mask": "torch.bool",
        "input_ids": "torch.int32",
        "loss_mask": "torch.int32",
        "logprobs": "torch.float32",
        "versions": "torch.int32",
        "rewards": "torch.float32",
        "prompt_id": "torch.int64",
        "sample_id": "torch.int32",
        "finish_reason": "torch.int32",
    }


@pytest.mark.parametrize("name", ["slime", "pt"])
def test_what_is_exported_imports_to_the_same_batch(name, tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=2)
    export_record(tmp_path / "record", name, tmp_path / "{step}.pt")
    import_record(tmp_path, tmp_path / "back", {"slime": "slime", "pt": "areal"}[name])
    first, back = open_record(tmp_path / "record"), open_record(tmp_path / "back")
    for step in (0, 1):
        ours, theirs = first.step(step).batch(0), back.step(step).batch(0)
        assert theirs.keys() - ours.keys() == {"prompt_length", "unknown"}
        for key in ours.keys() - {"prompt_id"}:
            assert ours[key].tobytes() == theirs[key].tobytes()


def test_slime_files_hold_plain_values_under_slimes_names(record, tmp_path):
    export_record(record, "slime", tmp_path / "0.pt", step=0)
    document = torch.load(tmp_path / "0.pt", weights_only=True)
    sample = document["samples"][1]
    row = rows(record, [0])[1]
    assert document["rollout_id"] == 0
    assert sample["tokens"] == row["input_ids"].tolist()
    assert sample["response_length"] == len(sample["loss_mask"]) == len(sample["rollout_log_probs"]) == 6
    assert sample["weight_versions"] == ["0"]
    assert sample["status"] == "completed"


def test_several_steps_need_a_name_each_and_nothing_is_replaced_unless_requested(record, tmp_path):
    with pytest.raises(RecordError, match=r"there are 2.*\{step\}"):
        export_record(record, "slime", tmp_path / "all.pt")
    with pytest.raises(StepNotRecorded, match="step 7"):
        export_record(record, "jsonl", tmp_path / "a.jsonl", step=7)
    assert list(tmp_path.glob("a.jsonl")) == []
    (tmp_path / "b.jsonl").write_text("mine")
    with pytest.raises(RecordExists):
        export_record(record, "jsonl", tmp_path / "b.jsonl")
    assert (tmp_path / "b.jsonl").read_text() == "mine"
    export_record(record, "jsonl", tmp_path / "b.jsonl", overwrite=True)
    with pytest.raises(RecordError, match="create it first"):
        export_record(record, "jsonl", tmp_path / "no" / "b.jsonl")


def test_the_verb_exports_and_reports_what_is_lost(record, tmp_path):
    arguments = ["record", "export", str(record), "--format", "slime", "--to", str(tmp_path / "{step}.pt")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert "2 steps in" in done.output
    assert "and 1 more files" in done.output
    assert "not carried by slime" in done.output
    done = CliRunner().invoke(main, [*arguments, "--json"])
    assert done.exit_code == 2
    assert "--force" in done.output
