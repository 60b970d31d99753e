"""GRPO on GSM8K: one question, several answers, a verifiable reward.

    areal-debug train examples/gsm8k_grpo.py --config examples/gsm8k_grpo.yaml --dump-rollout

Only one line differs from a script without record and replay: `wire` reads the config and the flags
of recording.
"""

import sys

from transformers import AutoTokenizer

from areal_core.config import GRPOConfig
from areal_core.data import get_dataset
from areal_core.trainer.rl import PPOTrainer
from areal_debug.wiring import wire


def main(argv: list[str]) -> None:
    config, hooks = wire(argv, GRPOConfig)
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path or config.actor.path)
    train_dataset = get_dataset(config.train_dataset, tokenizer=tokenizer)
    with PPOTrainer(config, train_dataset, **hooks) as trainer:
        trainer.train(
            workflow="areal_core.rollout.workflow.RLVRWorkflow",
            workflow_kwargs={
                "reward_fn": "areal_core.reward.gsm8k_reward_fn",
                "gconfig": config.gconfig,
                "enable_thinking": False,
            },
        )


if __name__ == "__main__":
    main(sys.argv[1:])
