"""Records as files of other tools, read by their own libraries to the same values."""

from pathlib import Path

import pytest
import torch

from recorder import open_record
from recorder.tables.formats import export_record
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
