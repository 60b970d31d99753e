"""The options of a replay: what a record says is text, and never a place to write."""

from dataclasses import replace
from pathlib import Path

import pytest

from recorder import open_record
from replayer.request import is_new_option_at_default, replay_config

RECORD = Path(__file__).parents[1] / "records" / "tiny_grpo.zip"


def hostile_record():
    record = open_record(RECORD)
    config = record.header.config | {"experiment_name": "../../x/${oc.env:SECRET}", "trial_name": ".."}
    config |= {"cluster": {**config["cluster"], "fileroot": str(Path.home())}}
    return replace(record, header=replace(record.header, config=config))


def test_a_record_does_not_say_where_its_replay_writes(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET", "s3cret")
    config = replay_config(hostile_record())
    assert Path(config.cluster.fileroot).is_dir()
    assert Path(config.cluster.fileroot).stat().st_mode & 0o077 == 0
    assert "/areal-" in config.cluster.fileroot
    assert config.trial_name == "_-replay"
    assert not any(part in config.experiment_name for part in ("/", "s3cret"))
    named = replay_config(hostile_record(), settings=(f"cluster.fileroot={tmp_path}",))
    assert named.cluster.fileroot == str(tmp_path)


@pytest.mark.parametrize(
    ("option", "value", "recorded", "expected"),
    [
        ("actor.fsdp.compile", False, {"actor": {"fsdp": {"offload_params": False}}}, True),
        ("actor.fsdp.compile", True, {"actor": {"fsdp": {}}}, False),  # the default was not used then
        ("actor.fsdp.compile", False, {"actor": {"fsdp": {"compile": True}}}, False),
        ("actor.reward_norm", None, {"actor": {"reward_norm": {"eps": 1e-5}}}, False),
        ("actor.kl_ctl", 0.1, {"actor": {"kl_ctl": None}}, False),  # given, as nothing
        ("actor.no_such_option", None, {"actor": {}}, False),
        ("of_a_script.own", 1, {}, False),
    ],
)
def test_an_option_younger_than_a_record_differs_from_it_only_by_another_value(
    option, value, recorded, expected
):
    assert is_new_option_at_default(option, value, recorded) is expected
