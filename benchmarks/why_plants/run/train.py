"""The user's script of every run: a tiny model, the embedded engine, a reward of its own."""

import sys
from pathlib import Path

from rows import prepare

from areal_core.config import GRPOConfig
from areal_core.data import get_dataset
from areal_core.trainer.rl import PPOTrainer
from areal_debug.wiring import wire

REWARD = f"{Path(__file__).parent}/rewards.py:even_share"


if __name__ == "__main__":
    config, hooks = wire(sys.argv, GRPOConfig)
    rows = prepare(get_dataset(config.train_dataset))
    arguments = {"reward_fn": REWARD}
    with PPOTrainer(config, rows, **hooks) as trainer:
        trainer.train(workflow_kwargs=arguments)
