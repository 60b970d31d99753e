"""The options of a replay: what a record says is text, and never a place to write."""

from dataclasses import replace
from pathlib import Path

from recorder import open_record
from replayer.request import replay_config

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
