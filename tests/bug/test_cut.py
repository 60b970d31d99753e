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
from replayer.preconditions import check_model
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
    check_model(open_record("bug.zip"), None, 1)  # which the record carries
    assert config["cluster"]["fileroot"] == ""


@pytest.mark.long
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
