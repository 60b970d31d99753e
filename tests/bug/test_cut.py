"""A cut record has all that its replay needs, and gives the expected bits elsewhere."""

import math
import shutil
from pathlib import Path

import pytest

from recorder import open_record, verify
from recorder.archive.extract import extract_record
from replayer.bug.cut_request import CutRequest, check_cut
from replayer.carried import read_cut
from replayer.errors import ReplayError, WrongModel
from replayer.request import Request
from replayer.run import replay_and_compare
from tests.replayer.conftest import train_and_record


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Another folder, home and temporary folder."""
    for name in ("home", "tmp", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def replay_of(file, step):
    return replay_and_compare(Request(str(file), step, step))


@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_step_replays_without_its_record_and_its_model(
    step, bad_run, cut_to, elsewhere, tiny_model, tmp_path
):
    model, record = tmp_path / "model", tmp_path / "record"
    shutil.copytree(tiny_model, model)
    shutil.copytree(bad_run.path, record)
    report = cut_to(elsewhere / "bug.zip", record, step, model=str(model))
    shutil.rmtree(model)
    shutil.rmtree(record)
    before = open_record(bad_run.path).step(step)
    after = open_record(elsewhere / "bug.zip").step(step)
    assert after.outcome(0) == before.outcome(0)
    assert after.plan(0) == before.plan(0)
    assert after.text(0) == before.text(0)
    found = replay_of("bug.zip", step)
    assert found.identical
    assert found.steps[0].num_compared > 100
    assert found.set_differently.config == ()
    assert report.cut.kept is None
    assert report.rows == 16
    assert (elsewhere / "bug.zip").stat().st_size < 2_000_000


def test_a_cut_is_an_intact_record_without_a_folder_of_this_machine(bad_run, cut_to, elsewhere, tiny_model):
    cut_to(elsewhere / "bug.zip", bad_run.path, 1)
    report = verify("bug.zip")
    assert report.intact
    assert report.steps_missing == ()
    extract_record("bug.zip", Path("extracted"))
    folders = [str(tiny_model.parent), str(Path(bad_run.path).parent)]
    files = [path for path in Path("extracted").rglob("*") if path.is_file()]
    assert not [str(f) for f in files if any(folder.encode() in f.read_bytes() for folder in folders)]
    config = open_record("bug.zip").header.config
    assert config["actor"]["path"] == "models/actor"
    assert config["cluster"]["fileroot"] == ""


def test_a_bad_sample_is_shrunk_to_two_tokens_of_one_row(bad_run, cut_to, elsewhere):
    seen = []
    report = cut_to(elsewhere / "bug.zip", bad_run.path, 2, seen=seen, symptom="loss is nan")
    assert (report.rows, report.tokens, report.is_minimal) == (1, 2, True)
    assert report.cut.kept == ("202.1",)
    assert math.isnan(report.numbers["loss"])
    assert [len(rows) for rows in seen[:4]] == [8, 4, 2, 1]
    assert read_cut(open_record("bug.zip")).symptom == "loss is nan"
    found = replay_of("bug.zip", 2)
    assert found.identical
    assert math.isnan(found.steps[0].loss)


@pytest.mark.long
def test_a_second_cut_gives_the_same_rows_and_numbers(bad_run, cut_to, elsewhere):
    one = cut_to(elsewhere / "one.zip", bad_run.path, 2, symptom="grad_norm is nan")
    two = cut_to(elsewhere / "two.zip", bad_run.path, 2, symptom="grad_norm is nan")
    assert (one.cut.kept, one.tokens, one.num_runs) == (two.cut.kept, two.tokens, two.num_runs)
    steps = [open_record(name).step(2) for name in ("one.zip", "two.zip")]
    assert steps[0].batch(0)["input_ids"].tolist() == steps[1].batch(0)["input_ids"].tolist()
    assert steps[0].outcome(0).checksums == steps[1].outcome(0).checksums


@pytest.mark.long
def test_an_interrupt_keeps_the_best_so_far(bad_run, cut_to, elsewhere):
    seen = []
    report = cut_to(
        elsewhere / "bug.zip", bad_run.path, 2, lambda: len(seen) > 1, seen, symptom="loss is nan"
    )
    assert (report.rows, report.is_minimal) == (4, False)
    assert replay_of("bug.zip", 2).identical


def test_a_symptom_that_does_not_occur_is_said(bad_run, cut_to, elsewhere):
    with pytest.raises(ReplayError, match="the symptom does not occur: 'loss is nan' is false of 16 rows"):
        cut_to(elsewhere / "bug.zip", bad_run.path, 1, symptom="loss is nan")


@pytest.mark.long
def test_a_step_that_ends_with_an_error_is_shrunk_to_the_row_that_causes_it(
    tmp_path, tiny_model, cut_to, elsewhere
):
    record = write_rollouts(tmp_path, tiny_model)
    with pytest.raises(ReplayError, match="the step ends with an error"):
        cut_to(elsewhere / "other.zip", record, 0, symptom="loss is nan")
    report = cut_to(elsewhere / "bug.zip", record, 0, symptom='"IndexError" in error')
    assert (report.rows, report.tokens) == (1, 3)  # the first, the unknown, one in the loss mask
    assert report.cut.error.startswith("IndexError")
    with pytest.raises(IndexError):
        replay_of("bug.zip", 0)


def write_rollouts(folder, model):
    """Record rollouts alone in which one row has a token that the model does not know."""
    import numpy as np

    from recorder.format import STEPS_FOLDER
    from recorder.header import write_header
    from recorder.step_files import RankStep, commit_step, write_rank
    from recorder.tensors import flatten
    from replayer.bug.cut import Recording, replace
    from replayer.source import recorded_batch

    run = train_and_record(folder / "whole", model, 1)
    source, target = open_record(run.path), folder / "rollouts"
    batch = recorded_batch(source.step(0), 0)
    batch["input_ids"][6, 1] = 5000
    place = target / STEPS_FOLDER / "000000"
    place.mkdir(parents=True)
    write_header(target, replace(source.header, recording=Recording("rollout")))
    commit_step(place, 0, 1, [write_rank(place, 0, 1, RankStep(0, 1, flatten(batch)))], None)
    assert np.max(open_record(target).step(0).batch(0)["input_ids"]) == 5000
    return target


@pytest.mark.long
def test_reference_and_critic_are_carried(tmp_path, tiny_model, cut_to, elsewhere):
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    critic = {"path": str(model), "dtype": "float32", "optimizer": {"lr": 1e-3}, "mb_spec": {}}
    run = train_and_record(
        tmp_path / "run",
        model,
        2,
        lambda batch, step: batch | {"prompt_id": batch["prompt_id"] + 100 * step},
        ref={"path": str(model), "dtype": "float32"},
        critic=critic,
        actor__kl_ctl=0.1,
    )
    cut_to(elsewhere / "bug.zip", run.path, 1)
    shutil.rmtree(model)
    assert replay_of("bug.zip", 1).identical


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"symptom": "losses > 0"}, "there is no 'losses'"),
        ({"symptom": "1 > 0"}, "does not depend on the step"),
    ],
)
def test_what_cannot_be_cut_is_said_before_a_model_is_loaded(settings, why, bad_run):
    with pytest.raises(ReplayError, match=why):
        check_cut(open_record(bad_run.path), CutRequest(bad_run.path, 1, "", **settings))


def test_a_cut_of_a_stranger_with_code_or_other_folders_is_refused(bad_run, cut_to, elsewhere):
    from recorder import commit_anchor

    cut_to(elsewhere / "bug.zip", bad_run.path, 1)
    extract_record("bug.zip", Path("cut"))
    anchor = Path("cut/anchors/000001")
    for name, content in (
        ("model.py", "import os"),
        ("weights.bin", "pickle"),
        ("adapter_config.json", '{"base_model_name_or_path": "/etc"}'),
    ):
        (anchor / "models/actor" / name).write_text(content)
        commit_anchor(anchor, 1)
        with pytest.raises(WrongModel, match="do not use this file"):
            replay_of("cut", 1)
        (anchor / "models/actor" / name).unlink()
    config = anchor / "models/actor/config.json"
    config.write_text(config.read_text().replace("{", '{"auto_map": {"AutoConfig": "evil.Config"},', 1))
    commit_anchor(anchor, 1)
    with pytest.raises(WrongModel, match="names code or other files to load"):
        replay_of("cut", 1)
