"""The writer as an observer: the files that it writes, refuses to overwrite, or never changes."""

import pytest
import torch

from recorder import RecordExists, Recording, RecordingOptions, RecordWriter, StepNotRecorded, open_record
from recorder.documents import checksum
from recorder.header import write_header
from recorder.testing import (
    SCRIPTED_HEADER,
    scripted_batch,
    scripted_learning,
    send_step,
    start_facts,
    write_scripted_record,
)


class Letters:
    """A tokenizer whose ids are letters: 1 is `a`."""

    def __init__(self, folder):
        self.name_or_path = folder

    def decode(self, ids):
        return "".join(chr(96 + token) for token in ids)


def writer_of_one_rank(folder, **options):
    return RecordWriter(folder, options=RecordingOptions(**options))


def test_a_run_is_recorded_through_its_events(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "notes.md"):
        (model / name).write_text(name)
    writer = writer_of_one_rank(tmp_path / "record")
    writer("start", **start_facts() | {"model_path": str(model), "tokenizer": Letters(str(model))})
    send_step(writer, 5, scripted_batch([3, 4]))
    writer("weights", step=5, version=6, seconds=0.1)
    writer("end", steps=1, error=None)
    record = open_record(tmp_path / "record")
    assert record.steps == (5,)
    assert record.header.config == SCRIPTED_HEADER.config | {"allocation_mode": "fsdp:d1"}
    assert (record.header.allocation, record.header.world_size, record.header.num_ranks) == ("fsdp:d1", 1, 1)
    assert set(record.header.model["files"]) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert record.header.model["files"]["config.json"] == {
        "size_bytes": 11,
        "crc32c": checksum(b"config.json"),
    }
    assert record.header.tokenizer == record.header.model
    assert record.header.environment["torch"]["build"] == torch.__version__
    assert not list((tmp_path / "record").rglob("*.tmp")) + list((tmp_path / "record").rglob("manifest-*"))


def test_the_trainer_may_change_its_tensors_after_the_batch_event(tmp_path):
    batch = {key: torch.from_numpy(array) for key, array in scripted_batch([3, 4], seed=1).items()}
    writer = writer_of_one_rank(tmp_path)
    write_header(tmp_path, SCRIPTED_HEADER)

    def spoil(event, **facts):
        writer(event, **facts)
        if event == "batch":
            for tensor in batch.values():
                tensor.zero_()

    spoil("batch", step=0, version=0, batch=batch, rng={})
    writer("step", step=0, version=1, plan={}, stats={}, checksums={})
    expected = scripted_batch([3, 4], seed=1)
    arrays = open_record(tmp_path).step(0).batch(0)
    assert arrays["rewards"].tolist() == expected["rewards"].tolist()
    assert arrays["logprobs"].tobytes() == expected["logprobs"][expected["attention_mask"]].tobytes()


def test_recording_into_a_record_is_refused_unless_requested(tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=3)
    with pytest.raises(
        RecordExists, match="already holds a record: choose another folder, or replace it: --force"
    ):
        writer_of_one_rank(tmp_path / "record")
    writer = writer_of_one_rank(tmp_path / "record", overwrite=True)
    assert open_record(tmp_path / "record").steps == (0, 1, 2)  # nothing is lost before the run has started
    writer("start", **start_facts())
    assert open_record(tmp_path / "record").steps == ()
    send_step(writer, 0, scripted_batch([3]))
    assert open_record(tmp_path / "record").steps == (0,)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("is_record", [False, True])
def test_files_that_are_no_part_of_a_record_are_never_deleted(tmp_path, overwrite, is_record):
    folder = tmp_path / "folder"
    if is_record:
        write_scripted_record(folder)
    (folder / "steps").mkdir(parents=True, exist_ok=True)
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(RecordExists):
        writer_of_one_rank(folder, overwrite=overwrite)
    assert (folder / "thesis.tex").read_text() == "years of work"


def test_an_overwrite_killed_half_way_leaves_a_record_that_can_be_overwritten(tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=3)
    (tmp_path / "record/steps/000001/step.json").unlink()
    writer_of_one_rank(tmp_path / "record", overwrite=True)("start", **start_facts())
    assert open_record(tmp_path / "record").steps == ()


def test_the_full_scope_contains_what_was_trained_on_and_smaller_ones_report_that_they_do_not(tmp_path):
    batch = scripted_batch([3, 4], seed=1)
    for scope in ("rollout", "plan", "full"):
        write_scripted_record(
            tmp_path / scope, num_steps=1, num_ranks=2, options=RecordingOptions(Recording(scope))
        )
    rollout, plan, full = (open_record(tmp_path / scope).step(0) for scope in ("rollout", "plan", "full"))
    batch = scripted_batch([3, 8, 6, 4], seed=1)
    expected = scripted_learning(batch)
    assert set(full.learning(1)) == {"cu_seqlens", "loss_mask", "prox_logp", "advantages"}
    for key, padded in expected.items():
        assert full.learning(1)[key].tobytes() == padded[batch["attention_mask"]].tobytes()
    assert [sorted({name.split("-")[0] for name in step.manifest.batches}) for step in (plan, full)] == [
        ["batch"],
        ["batch", "learning"],
    ]
    assert rollout.manifest.files == {}
    assert rollout.batch(1)["rewards"].tolist() == batch["rewards"].tolist()
    assert rollout.manifest.version == 1
    with pytest.raises(
        StepNotRecorded, match=r"plan-00000-of-00002.json was not recorded: it needs debug.dump_scope=plan"
    ):
        rollout.plan(0)
    with pytest.raises(StepNotRecorded, match=r"outcome-00001-of-00002.json was not recorded"):
        rollout.outcome(1)
    with pytest.raises(
        StepNotRecorded, match=r"learning-00000-of-00002.safetensors was not recorded: it needs .*=full"
    ):
        plan.learning(0)
