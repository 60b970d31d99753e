"""A real training loop: when checkpoints are written, and what a logging service receives."""

import pytest

from areal_core.trainer.sft import SFTTrainer
from tests.trainer.supervised_config import make_config

ROWS = [{"input_ids": [5 + i, 6, 7, 8 + i % 3], "loss_mask": [0, 1, 1, 1]} for i in range(6)]


@pytest.mark.parametrize(
    ("periods", "steps"),
    [
        pytest.param({"freq_epochs": 1}, {2, 5}, marks=pytest.mark.long),
        ({"freq_epochs": 1, "freq_steps": 2}, {1, 2, 3, 5}),
        ({"freq_secs": 100}, {1, 3, 5}),
        ({}, set()),
    ],
)
def test_checkpoints_are_written_whenever_a_period_ends(
    tiny_model, in_process, tmp_path, monkeypatch, periods, steps
):
    """Two epochs of three steps."""
    options = {"total_train_epochs": 2} | {f"saver.{name}": value for name, value in periods.items()}
    config = make_config("sft", tmp_path, tiny_model, 2, options)
    with SFTTrainer(config, ROWS, join=in_process) as trainer:
        hours = iter(range(0, 10_000, 60))  # a clock by which each step takes a minute
        trainer.saver.frequency.clock = lambda: float(next(hours))
        trainer.saver.frequency.__post_init__()
        monkeypatch.setattr(trainer.saver, "save", lambda name: (tmp_path / name).mkdir())
        trainer.train()
    assert {path.name for path in tmp_path.glob("globalstep*")} == {f"globalstep{step}" for step in steps}
