"""The run that the record is of: replace dataset, reward and options by your own."""

import sys

from areal_core.config import GRPOConfig
from areal_core.data import get_dataset
from areal_core.trainer.rl import PPOTrainer
from areal_debug.wiring import wire


def reward(prompt, completions, prompt_ids, completion_ids, **row):
    """Return the share of tokens with an even id."""
    return sum(token % 2 == 0 for token in completion_ids) / max(len(completion_ids), 1)


if __name__ == "__main__":
    config, hooks = wire(sys.argv, GRPOConfig)
    with PPOTrainer(config, get_dataset(config.train_dataset), **hooks) as trainer:
        trainer.train(workflow_kwargs={"reward_fn": reward})
