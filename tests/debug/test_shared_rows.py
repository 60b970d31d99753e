"""Runs whose ranks share the tokens of the same rows, on the command line.

Rows are sampled, counted and recorded once.
"""

import json
from pathlib import Path

import pytest

from recorder import open_record

pytestmark = pytest.mark.long
COUNTS = ("rollout/n_seqs", "ppo_actor/n_seqs", "ppo_actor/n_tokens", "eval-rollout/n_seqs")
CLOSE = ("ppo_actor/task_reward/avg", "ppo_actor/update/grad_norm", "ppo_actor/update/entropy/avg")
EVALUATED = (
    "valid_dataset.path=arithmetic",
    "valid_dataset.type=rl",
    "valid_dataset.dataset_kwargs.num_rows=6",
    "evaluator.freq_steps=2",
)


def run(train, folder: Path, allocation: str, *options: str) -> list[dict[str, float]]:
    """Record a run and return the statistics of each step."""
    files = f"cluster.fileroot={folder}"
    done = train(files, "--dump-rollout", folder / "record", f"allocation_mode={allocation}", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    [stats] = folder.glob("logs/*/tiny/test/stats.jsonl")
    return [json.loads(line) for line in stats.read_text().splitlines()]


def test_four_ranks_in_two_groups_train_as_two_ranks_do_and_replay_to_the_bit(areal_debug, train, tmp_path):
    options = ("debug.dump_scope=full", "debug.anchor_every_steps=2", "gconfig.max_new_tokens=11", *EVALUATED)
    shared = run(train, tmp_path / "shared", "embedded|fsdp:d2c2", *options)
    alone = run(train, tmp_path / "alone", "embedded|fsdp:d2", *options)
    for step, expected in zip(shared, alone, strict=True):
        assert {name: step[name] for name in COUNTS if name in step} == {
            name: expected[name] for name in COUNTS if name in expected
        }
    assert shared[1]["eval-rollout/n_seqs"] == 6 * 4
    first, expected = shared[0], alone[0]  # later steps sample from weights that differ by rounding
    assert {name: first[name] for name in CLOSE} == pytest.approx({n: expected[n] for n in CLOSE}, rel=1e-4)
    record = open_record(tmp_path / "shared" / "record")
    assert (record.header.world_size, record.header.num_ranks) == (4, 2)
    for arguments in ((), ("--from-step", 2)):
        done = areal_debug("replay", record.path, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Bit-identical" in done.stdout
    done = areal_debug("replay", record.path, "--nproc", 1, "allocation_mode=fsdp:d1", "--to-step", 0)
    assert "1 ranks, recorded with 2" in done.stdout, done.stdout + done.stderr


def test_dropout_of_ranks_that_share_rows_replays_to_the_bit(areal_debug, train, tiny_model, tmp_path):
    config = json.loads((tiny_model / "config.json").read_text()) | {"attention_dropout": 0.2}
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_model.iterdir():
        (model / file.name).symlink_to(file)
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config))
    run(
        train, tmp_path / "shared", "embedded|fsdp:d1c2", f"actor.path={model}", "actor.disable_dropout=false"
    )
    done = areal_debug("replay", tmp_path / "shared" / "record")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Bit-identical: 3 of 3 steps" in done.stdout
