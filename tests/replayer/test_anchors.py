"""When anchors are saved and removed, and how recovery checkpoints become anchors."""

import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_core.config import GRPOConfig, OptimizerConfig, PPOActorConfig
from areal_core.engine.checkpoint.files import Checkpoint, write_checkpoint_file
from areal_core.errors import CheckpointError
from recorder import open_record, verify
from recorder.testing import write_scripted_record
from replayer.anchors import REPLAYED, AnchorPolicy, AnchorTaker, adopt_checkpoint
from replayer.errors import ReplayError
from replayer.preconditions import check_anchor
from replayer.run import total_steps


def save(folder: Path, step: int) -> None:
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"w" * 10_000)


def run(taker, num_steps, seconds=1.0, first=0):
    """Return the events of a run whose steps take so many seconds to replay."""
    taker("start", version=first, save_checkpoint=save)
    for step in range(first, first + num_steps):
        taker("step", step=step, stats={f"timeperf/{name}": seconds / len(REPLAYED) for name in REPLAYED})
        taker("weights", step=step, version=step + 1)


def anchors_of(tmp_path, policy, num_steps=10, **options):
    write_scripted_record(tmp_path / "record")
    run(AnchorTaker(tmp_path / "record", 0, policy), num_steps, **options)
    assert verify(tmp_path / "record").problems == ()
    return open_record(tmp_path / "record").anchors()


@pytest.mark.parametrize(
    ("policy", "first", "expected"),
    [
        (AnchorPolicy(every_steps=4), 0, (4, 8)),
        (AnchorPolicy(max_replay_s=3.0), 0, (3, 6, 9)),  # once the way from the last one is too long
        (AnchorPolicy(), 0, ()),
        (AnchorPolicy(), 40, (40,)),  # a resumed run starts with one
    ],
)
def test_a_policy_makes_anchors_of_these_steps(tmp_path, policy, first, expected):
    assert anchors_of(tmp_path, policy, first=first) == expected


def test_within_a_limit_of_bytes_the_ways_stay_even(tmp_path):
    size = 10_400  # a checkpoint and its anchor.json
    kept = anchors_of(tmp_path, AnchorPolicy(every_steps=1, at_start=True, max_bytes=5 * size), num_steps=16)
    assert (kept[0], kept[-1]) == (0, 16)
    assert 4 <= len(kept) <= 6
    gaps = [b - a for a, b in itertools.pairwise(kept)]
    assert max(gaps) <= 8


def test_a_recovery_checkpoint_becomes_an_anchor_without_a_second_copy(tmp_path):
    write_scripted_record(tmp_path / "record")
    save(tmp_path / "recover" / "step-000002", 2)
    taker = AnchorTaker(tmp_path / "record", 0, AnchorPolicy())
    taker("checkpoint", step=2, folder=tmp_path / "recover" / "step-000002")
    record = open_record(tmp_path / "record")
    anchored = record.anchor(2) / "checkpoint" / "weights"
    original = tmp_path / "recover" / "step-000002" / "weights"
    assert os.path.samefile(anchored, original)
    original.unlink()  # recovery keeps only its last ones
    assert anchored.read_bytes() == b"w" * 10_000
    assert verify(tmp_path / "record").problems == ()


def test_a_damaged_anchor_is_reported_before_any_rank_starts(tmp_path):
    write_scripted_record(tmp_path / "record")
    folder = tmp_path / "made"
    folder.mkdir()
    write_checkpoint_file(folder, Checkpoint({}, [], {}, {}))
    adopt_checkpoint(tmp_path / "record", 2, folder)
    check_anchor(open_record(tmp_path / "record"), 3)
    file = tmp_path / "record/anchors/000002/checkpoint/checkpoint.json"
    file.write_text(file.read_text().replace('"format": 2', '"format": 9'))
    with pytest.raises(CheckpointError, match=r"has format 9, this version reads formats up to 2"):
        check_anchor(open_record(tmp_path / "record"), 3)
    check_anchor(open_record(tmp_path / "record"), 1)  # starts from the model folder


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"warmup_steps_proportion": 0.0}, 6),
        ({"lr_scheduler_type": "cosine"}, "6 steps and not 4"),
        ({"warmup_steps_proportion": 0.5}, "6 steps and not 4"),
    ],
)
def test_a_run_that_was_resumed_with_another_length_is_replayed_to_its_end_or_refused(optimizer, expected):
    """Where the learning rate depends on the length, no schedule gives the steps of both parts."""

    def step(number):
        details = {"total_steps": 4 if number < 4 else 6}
        return SimpleNamespace(plan=lambda rank: SimpleNamespace(details=details))

    recording = SimpleNamespace(has_plans=True)
    record = SimpleNamespace(path="r", steps=range(6), step=step, header=SimpleNamespace(recording=recording))
    config = GRPOConfig(actor=PPOActorConfig(optimizer=OptimizerConfig(**optimizer)))
    assert total_steps(record, config, 4, None) == 6
    if isinstance(expected, int):
        assert total_steps(record, config, 0, None) == expected
    else:
        with pytest.raises(ReplayError, match=expected):
            total_steps(record, config, 0, 5)
    assert total_steps(record, config, 0, 3) == 4
