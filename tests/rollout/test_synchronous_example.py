"""The example of synchronous training, run for real on a tiny model."""

import os
from pathlib import Path

import pytest

from areal_core.environment import DETERMINISTIC
from areal_core.telemetry.loggers import read_stats
from recorder import open_record
from tests.forks import run_forked

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = (
    *("allocation_mode=embedded|fsdp:d1", "device=cpu", "total_train_steps=2", "evaluator.freq_steps=2"),
    *(
        "train_dataset.path=arithmetic",
        "train_dataset.dataset_kwargs={num_rows: 8}",
        "train_dataset.batch_size=2",
    ),
    *("valid_dataset.path=arithmetic", "valid_dataset.dataset_kwargs={num_rows: 3, seed: 9}"),
    *("gconfig.n_samples=2", "gconfig.max_new_tokens=6", "eval_gconfig.max_new_tokens=4"),
    *("actor.dtype=float32", "actor.gradient_checkpointing=false", "actor.weight_update_mode=disk"),
)


@pytest.mark.long
def test_the_synchronous_example_trains_on_its_own_weights_samples_and_validates(tiny_model, tmp_path):
    example = str(EXAMPLES / "synchronous")
    done = run_forked(
        [
            *("-m", "areal_debug.train.script", f"{example}.py", "--config", f"{example}.yaml"),
            *("--dump-rollout", str(tmp_path / "record"), *TINY),
            *(f"cluster.fileroot={tmp_path}", f"actor.path={tiny_model}"),
        ],
        os.environ | DETERMINISTIC,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = open_record(tmp_path / "record")
    for step in range(2):
        batch = record.step(step).batch(0)
        assert set(batch["versions"][batch["loss_mask"] == 1].tolist()) == {step}
        assert batch["prompt_id"].tolist() == [2 * step, 2 * step, 2 * step + 1, 2 * step + 1]
    stats = read_stats(next(tmp_path.rglob("stats.jsonl")))
    # Engine and trainer agree, so the ratio of a step's only minibatch is 1 without recomputed
    # logprobs.
    assert abs(stats[1]["ppo_actor/update/importance_weight/max"] - 1) < 1e-4
    assert [step["eval-rollout/n_seqs"] for step in stats] == [3, 3]
