"""Summaries of posts, last of three steps: PPO with a critic on the scores of the reward model.

    areal-debug train examples/tldr_ppo.py --config examples/tldr_ppo.yaml --dump-rollout

The workflow itself gives no reward: the section `reward_model` of the config adds the scores.
"""

import sys

from areal_core.config import PPOConfig
from areal_core.data import get_dataset
from areal_core.reward import no_reward
from areal_core.trainer.build import load_tokenizer
from areal_core.trainer.rl import PPOTrainer
from areal_debug.wiring import wire


def main(argv: list[str]) -> None:
    config, hooks = wire(argv, PPOConfig)
    train_dataset = get_dataset(config.train_dataset, tokenizer=load_tokenizer(config))
    with PPOTrainer(config, train_dataset, **hooks) as trainer:
        trainer.train(
            workflow="areal_core.rollout.workflow.RLVRWorkflow", workflow_kwargs={"reward_fn": no_reward}
        )


if __name__ == "__main__":
    main(sys.argv[1:])
