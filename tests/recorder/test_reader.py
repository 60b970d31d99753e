"""Reading is lazy, checked, and needs neither torch nor the complete record."""

import subprocess
import sys

import pytest

from recorder import (
    DamagedRecord,
    NotARecord,
    RecordNotFound,
    StepNotRecorded,
    UnknownFormat,
    open_record,
)
from recorder.documents import checksummed_bytes, parse_checksummed
from recorder.testing import scripted_batch, write_scripted_record


def rewrite(path, **changes):
    """Change members of a checksummed file as a program that knows the format would."""
    path.write_bytes(checksummed_bytes(parse_checksummed(path.read_bytes(), path.name) | changes))


def test_every_rank_and_step_reads_what_was_written(record_of_two_ranks):
    record = open_record(record_of_two_ranks)
    assert (record.steps, record.uncommitted) == ((0, 1, 2), ())
    for step in record.steps:
        for rank in (0, 1):
            batch = scripted_batch([3, 8, 6, 4], seed=100 * step + rank)
            arrays = record.step(step).batch(rank)
            assert arrays["logprobs"].tobytes() == batch["logprobs"][batch["attention_mask"]].tobytes()
            assert arrays["prompt_id"].tolist() == batch["prompt_id"].tolist()
            assert arrays["cu_seqlens"].tolist() == [0, 3, 11, 17, 21]


def test_plan_and_outcome_read_back(record_of_two_ranks):
    step = open_record(record_of_two_ranks).step(2)
    plan, outcome = step.plan(1), step.outcome(1)
    assert (plan.step, plan.version, plan.rng) == (2, 2, {"torch": "c2VlZA=="})
    assert plan.details == {"learning_rate": 1e-6}
    assert outcome.version == 3
    assert outcome.stats == {"grad_norm": 0.2, "clip_ratio": 0.0}
    assert [(m.rows, m.num_tokens, m.loss, m.weight) for m in outcome.micro_batches] == [
        ((0, 1, 2, 3), 21, 2.5, 4.0)
    ]


def test_one_row_comes_without_padding(record_of_two_ranks):
    row = open_record(record_of_two_ranks).step(1).rows(0, 2)
    batch = scripted_batch([3, 8, 6, 4], seed=100)
    assert row["input_ids"].tolist() == batch["input_ids"][2, :6].tolist()
    assert row["rewards"] == batch["rewards"][2]
    assert set(row) == set(batch) - {"attention_mask"}


def test_only_the_requested_keys_are_read(record_of_one_rank):
    file = record_of_one_rank / "steps/000000/batch-00000-of-00001.safetensors"
    step = open_record(record_of_one_rank).step(0)
    place = step.manifest.batches[file.name].tensors["logprobs"]
    data = bytearray(file.read_bytes())
    data[place.offset] ^= 1
    file.write_bytes(data)
    assert list(step.batch(0, ["input_ids"])) == ["input_ids"]
    with pytest.raises(DamagedRecord, match="tensor logprobs: bytes do not match") as caught:
        step.batch(0)
    assert (caught.value.tensor, caught.value.file) == ("logprobs", f"steps/000000/{file.name}")


def test_unfinished_steps_are_listed_separately(tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=4)
    for step in ("000002", "000003"):
        (tmp_path / "record/steps" / step / "step.json").unlink()
    assert open_record(tmp_path / "record").steps == (0, 1, 2, 3)  # its end mark has the last step
    (tmp_path / "record/end.json").unlink()
    record = open_record(tmp_path / "record")
    assert (record.steps, record.uncommitted) == ((0, 1), (2, 3))
    with pytest.raises(StepNotRecorded, match=r"step 3 was not finished in .*: it holds steps 0 to 1"):
        record.step(3)
    with pytest.raises(StepNotRecorded, match="step 9 is not recorded"):
        record.step(9)


def test_a_step_that_lost_its_commit_later_is_damage_and_not_unfinished(record_of_two_ranks):
    (record_of_two_ranks / "steps/000001/step.json").unlink()
    record = open_record(record_of_two_ranks)
    assert record.uncommitted == ()
    with pytest.raises(DamagedRecord, match=r"steps/000001/step.json: is missing"):
        record.step(1)
    assert record.step(2).batch(0)["rewards"].shape == (4,)


def test_questions_that_a_record_cannot_answer(record_of_one_rank):
    step = open_record(record_of_one_rank).step(0)
    with pytest.raises(StepNotRecorded, match="ranks 0 to 0, not 1"):
        step.batch(1)
    with pytest.raises(StepNotRecorded, match="rows 0 to 3, not 4"):
        step.rows(0, 4)
    with pytest.raises(
        StepNotRecorded, match=r"has no \['entropy'\]: it has \['cu_seqlens', 'finish_reason'"
    ):
        step.batch(0, ["entropy"])
    assert step.text(0) is None


def test_what_is_not_a_record_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(RecordNotFound, match="does not exist: give the folder"):
        open_record(tmp_path / "nothing")
    with pytest.raises(NotARecord, match=r"holds no record.json"):
        open_record(tmp_path)


def test_newer_formats_are_refused_with_what_to_do(record_of_one_rank):
    file = record_of_one_rank / "record.json"
    original = file.read_bytes()
    rewrite(file, compression="zstd")
    with pytest.raises(UnknownFormat, match=r"record.json has unknown keys \['compression'\]: install"):
        open_record(record_of_one_rank)
    file.write_bytes(original)
    rewrite(record_of_one_rank / "steps/000000/step.json", partial=True)
    with pytest.raises(UnknownFormat, match=r"steps/000000/step.json has unknown keys \['partial'\]"):
        open_record(record_of_one_rank).step(0)


def test_a_record_is_read_and_verified_where_torch_cannot_be_imported(record_of_one_rank):
    code = f"""
import sys
for name in ("torch", "transformers", "safetensors", "deepdiff"):
    sys.modules[name] = None
from recorder import open_record, verify
step = open_record({str(record_of_one_rank)!r}).step(0)
assert verify({str(record_of_one_rank)!r}).intact
print(step.batch(0)["input_ids"].sum(), step.outcome(0).stats["grad_norm"], step.plan(0).version)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    total = scripted_batch([3, 8, 6, 4], seed=0)["input_ids"].sum()
    assert done.stdout.split() == [str(total), str(1 / 3), "0"]
