"""A run that resumes from a checkpoint resumes its record at exactly that step."""

from dataclasses import replace

import pytest

from areal_debug import Recorder
from recorder import RecordExists, RecordingOptions, RecordWriter, commit_anchor, open_record, verify
from recorder.header import Gaps
from recorder.resume import resume_record
from recorder.testing import SCRIPTED_HEADER, scripted_batch, send_step, start_facts, write_scripted_record

HEADER = replace(SCRIPTED_HEADER, num_ranks=1)


def continue_record(folder, first_step, num_steps, **options):
    writer = RecordWriter(folder, options=RecordingOptions(first_step=first_step, **options))
    writer("start", **start_facts())
    assert not (folder / "end.json").exists()
    for step in range(first_step, first_step + num_steps):
        send_step(writer, step, scripted_batch([3, 4], seed=step))
    writer("end", steps=num_steps, error=None)
    return open_record(folder)


def test_steps_after_the_checkpoint_are_recorded_again(tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=6)
    (tmp_path / "record/steps/000005/step.json").unlink()  # killed while it wrote step 5
    record = continue_record(tmp_path / "record", first_step=3, num_steps=2)
    assert record.steps == (0, 1, 2, 3, 4)
    assert [record.step(step).num_rows(0) for step in record.steps] == [4, 4, 4, 2, 2]
    assert record.header == open_record(tmp_path / "record").header
    report = verify(tmp_path / "record")
    assert report.intact
    assert (report.end.finished, report.end.last.step) == (True, 4)


@pytest.mark.parametrize(
    ("was_slower", "kept", "lost"), [(False, (0, 1, 2), (3, 4)), (True, (0, 1), (2, 3, 4))]
)
def test_steps_that_never_reached_the_disk_are_lost_and_not_damage(tmp_path, was_slower, kept, lost):
    write_scripted_record(tmp_path / "record", num_steps=3)
    if was_slower:  # the disk, than the run
        (tmp_path / "record/steps/000002/step.json").unlink()
        (tmp_path / "record/end.json").unlink()
    record = continue_record(tmp_path / "record", first_step=5, num_steps=1)
    assert (record.steps, record.gaps.lost) == ((*kept, 5), lost)
    assert verify(tmp_path / "record").intact
    with pytest.raises(ValueError, match="step 4 was not written before the run was interrupted"):
        record.step(4)


def test_anchors_after_the_checkpoint_are_removed(tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=6)
    for step in (0, 3, 5):
        folder = tmp_path / f"record/anchors/{step:06d}"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"w")
        commit_anchor(folder, step)
    resume_record(tmp_path / "record", 3, HEADER)
    assert open_record(tmp_path / "record").anchors() == (0, 3)
    assert verify(tmp_path / "record").intact


@pytest.mark.parametrize("num_removed", [1, 2, 3])
def test_an_interrupted_truncation_leaves_a_record(tmp_path, monkeypatch, num_removed):
    write_scripted_record(tmp_path / "record", num_steps=6)
    calls = []

    def rmtree(folder):
        calls.append(folder)
        if len(calls) == num_removed:
            raise KeyboardInterrupt

    monkeypatch.setattr("recorder.resume.shutil.rmtree", rmtree)
    with pytest.raises(KeyboardInterrupt):
        resume_record(tmp_path / "record", 2, HEADER)
    record = open_record(tmp_path / "record")
    assert record.steps == tuple(range(6 - num_removed))
    assert {problem.kind for problem in verify(tmp_path / "record").problems} == {"unfinished"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"path": "m", "files": {"config.json": {"size_bytes": 1, "crc32c": "0"}}}}, "model files"),
        ({"num_ranks": 2}, "data-parallel ranks"),
        ({"config": {"seed": 2, "actor": {"lr": 1e-6}}}, "seed=1, and this one has 2"),
        ({"config": {"seed": 1, "actor": {"lr": 2e-6}}}, "actor.lr=1e-06, and this one has 2e-06"),
    ],
)
def test_the_record_of_another_run_is_left_alone(tmp_path, changes, words):
    write_scripted_record(tmp_path / "record", num_steps=3)
    with pytest.raises(RecordExists, match=f"a run with .*{words}"):
        resume_record(tmp_path / "record", 1, replace(HEADER, **changes))
    assert open_record(tmp_path / "record").steps == (0, 1, 2)


def test_options_that_act_on_no_step_or_are_new_do_not_matter(tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=3)
    config = {"seed": 1, "actor": {"lr": 1e-6, "path": "elsewhere", "newer": 1}, "total_train_steps": 9}
    resume_record(tmp_path / "record", 2, replace(HEADER, config=config))
    assert open_record(tmp_path / "record").steps == (0, 1)


def test_the_configuration_of_another_trainer_is_kept_and_a_change_is_said(tmp_path, caplog):
    for lr, step in ((0.1, 0), (0.2, 1)):
        config = {"lr": lr, "clip": float("inf")}
        with Recorder(tmp_path / "r", config=config, trainer="mine", resume=True) as recorder:
            recorder.step(step, [{"prompt_tokens": [1], "completion_tokens": [2], "group": 0, "reward": 1.0}])
    assert open_record(tmp_path / "r").header.config["lr"] == 0.1
    assert "a run with lr=0.1, and this one has 0.2: the record keeps its first configuration" in caplog.text


def test_without_a_record_a_resumed_run_starts_one(tmp_path):
    record = continue_record(tmp_path / "record", first_step=4, num_steps=2)
    assert (record.steps, record.gaps) == ((4, 5), Gaps())
