"""GSM8K over several turns: after a wrong answer, feedback and another try at a lower reward.

areal-debug train examples/multi_turn.py --dump-rollout
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
            workflow="areal_core.agent.multi_turn.MultiTurnWorkflow",
            workflow_kwargs={
                "reward_fn": "areal_core.reward.gsm8k_reward_fn",
                "max_turns": 3,
                "turn_discount": config.rollout.agent.turn_discount,
            },
        )


if __name__ == "__main__":
    main(sys.argv)
