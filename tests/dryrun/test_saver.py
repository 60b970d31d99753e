"""A real training loop: when checkpoints are written, and what a logging service receives."""

import pytest

from areal_core.config import SFTConfig
from areal_core.config.train_engine import OptimizerConfig
from areal_core.trainer.sft import SFTTrainer

ROWS = [{"input_ids": [5 + i, 6, 7, 8 + i % 3], "loss_mask": [0, 1, 1, 1]} for i in range(6)]


@pytest.fixture
def config(tiny_model, in_process, tmp_path) -> SFTConfig:
    """Two epochs of three steps, in this process."""
    config = SFTConfig(experiment_name="e", trial_name="t", allocation_mode="fsdp:d1", total_train_epochs=2)
    config.cluster.fileroot = str(tmp_path)
    config.actor.path, config.actor.dtype = str(tiny_model), "float32"
    config.actor.optimizer = OptimizerConfig(lr=1e-2, warmup_steps_proportion=0.0)
    config.train_dataset.path, config.train_dataset.type, config.train_dataset.batch_size = "x", "sft", 2
    return config


@pytest.mark.parametrize(
    ("periods", "steps"),
    [
        ({"freq_epochs": 1}, {2, 5}),
        ({"freq_epochs": 1, "freq_steps": 2}, {1, 2, 3, 5}),
        ({"freq_secs": 100}, {1, 3, 5}),
        ({}, set()),
    ],
)
def test_checkpoints_are_written_whenever_a_period_ends(
    config, in_process, tmp_path, monkeypatch, periods, steps
):
    for name, value in periods.items():
        setattr(config.saver, name, value)
    with SFTTrainer(config, ROWS, join=in_process) as trainer:
        hours = iter(range(0, 10_000, 60))  # a clock by which each step takes a minute
        trainer.saver.frequency.clock = lambda: float(next(hours))
        trainer.saver.frequency.__post_init__()
        monkeypatch.setattr(trainer.saver, "save", lambda name: (tmp_path / name).mkdir())
        trainer.train()
    assert {path.name for path in tmp_path.glob("globalstep*")} == {f"globalstep{step}" for step in steps}
