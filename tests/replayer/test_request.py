"""The options of a replay, and the trainer's batches in recorded rollouts."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from areal_core.data.batch import pad_and_concat, select_rows
from areal_core.engine.determinism import rng_state
from areal_core.rollout.source import RolloutSource
from recorder import commit_anchor, open_record
from recorder.testing import scripted_batch, write_scripted_record
from replayer.errors import ReplayError
from replayer.preconditions import check_steps_present
from replayer.request import is_new_option_at_default, replay_config
from replayer.source import RecordedRollouts, recorded_batch, redistribute
from tests.recorder.ranks import begin

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


def assert_same_bits(left, right):
    assert set(left) == set(right)
    for key in left:
        assert left[key].dtype == right[key].dtype, key
        assert left[key].shape == right[key].shape, key
        assert left[key].numpy(force=True).tobytes() == right[key].numpy(force=True).tobytes(), key


def record_batch(folder, batch):
    (writer,) = begin(folder)
    writer("batch", step=0, version=0, batch=batch, rng=rng_state())
    writer("step", step=0, version=1, plan={}, stats={}, checksums={})
    return open_record(folder)


def test_each_rank_gets_its_own_batch_of_each_step_bit_for_bit(tmp_path):
    write_scripted_record(tmp_path / "record", rng=rng_state(), num_steps=3, num_ranks=2)
    record = open_record(tmp_path / "record")
    for rank in (0, 1):
        source: RolloutSource = RecordedRollouts(record, rank, 2)
        for step in (0, 1, 2, 1):
            batch = scripted_batch([3, 8, 6, 4], seed=100 * step + rank)
            expected = {key: torch.from_numpy(array) for key, array in batch.items()}
            assert_same_bits(source.next_batch(step, version=step), expected)


def test_another_number_of_ranks_gets_complete_groups_in_the_order_of_the_loader(tmp_path):
    write_scripted_record(tmp_path / "record", rng=rng_state(), num_steps=1, num_ranks=1, num_rows=8)
    record = open_record(tmp_path / "record")
    all_rows = RecordedRollouts(record, 0, 1).next_batch(0, 0)
    assert all_rows["prompt_id"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    for rank, rows in ((0, [0, 1, 6, 7]), (1, [2, 3]), (2, [4, 5])):
        batch = RecordedRollouts(record, rank, 3).next_batch(0, 0)
        assert_same_bits(batch, select_rows(all_rows, rows))


def test_ranks_that_recorded_apart_are_joined_in_canonical_order(tmp_path):
    write_scripted_record(tmp_path / "record", rng=rng_state(), num_steps=1, num_ranks=2)
    recorded = open_record(tmp_path / "record").step(0)
    left, right = (recorded_batch(recorded, rank) for rank in (0, 1))
    right["prompt_id"] = right["prompt_id"] + 2
    assert_same_bits(redistribute([right, left], 0, 1), pad_and_concat([left, right]))
    assert redistribute([right, left], 1, 2)["prompt_id"].tolist() == [1, 1, 1003, 1003]


def test_the_trainer_continues_with_its_random_numbers(tmp_path):
    torch.manual_seed(5)
    source = RecordedRollouts(record_batch(tmp_path / "record", scripted_batch([3, 5])), 0, 1)
    drawn = torch.rand(3)
    torch.manual_seed(6)
    source.next_batch(0, 0)
    assert torch.equal(torch.rand(3), drawn)


def test_a_missing_step_on_the_way_is_reported_before_the_replay_starts(tmp_path):
    write_scripted_record(tmp_path / "record", rng=rng_state(), num_steps=4)
    shutil.rmtree(tmp_path / "record/steps/000001")
    record = open_record(tmp_path / "record")
    check_steps_present(record, 0, 0)
    with pytest.raises(ReplayError, match=r"step 1 is not in .* replay to step 3 needs it.*available: none"):
        check_steps_present(record, 2, 3)
    (tmp_path / "record/anchors/000002").mkdir(parents=True)
    commit_anchor(tmp_path / "record/anchors/000002", 2)
    check_steps_present(open_record(tmp_path / "record"), 2, 3)
