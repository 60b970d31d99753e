"""Synchronous GRPO on GSM8K: every sample comes from the weights that train on it. With validation.

    areal-debug train examples/synchronous.py --config examples/synchronous.yaml --dump-rollout

Start here if an asynchronous run does not learn: if this one does not, staleness is not the cause.
"""

import sys

from areal_core.config import GRPOConfig
from areal_core.data import get_dataset
from areal_core.trainer.build import load_tokenizer
from areal_core.trainer.rl import PPOTrainer
from areal_debug.wiring import wire


def main(argv: list[str]) -> None:
    config, hooks = wire(argv, GRPOConfig)
    tokenizer = load_tokenizer(config)
    train_dataset = get_dataset(config.train_dataset, tokenizer=tokenizer)
    valid_dataset = get_dataset(config.valid_dataset, tokenizer=tokenizer)
    with PPOTrainer(config, train_dataset, valid_dataset, **hooks) as trainer:
        # Validation uses the same workflow, with eval_gconfig.
        trainer.train(workflow_kwargs={"reward_fn": "areal_core.reward.gsm8k_reward_fn"})


if __name__ == "__main__":
    main(sys.argv)
