"""Train a model to add by GRPO; the demo's script, and a small example of a user's own script."""

import sys

from areal_core.config import GRPOConfig
from areal_core.data import get_dataset
from areal_core.reward import arithmetic_reward_fn
from areal_core.trainer.rl import PPOTrainer
from areal_debug.wiring import wire


def main(argv: list[str]) -> None:
    """Train with the options of the config."""
    config, hooks = wire(argv, GRPOConfig)
    with PPOTrainer(config, get_dataset(config.train_dataset), **hooks) as trainer:
        trainer.train(workflow_kwargs={"reward_fn": arithmetic_reward_fn})


if __name__ == "__main__":
    main(sys.argv)
