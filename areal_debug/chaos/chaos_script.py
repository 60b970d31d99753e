"""One rank of the training of `areal-debug chaos`: a script like a user's own."""

import sys

from areal_debug.chaos.even_reward import even_share
from areal_debug.train.script import mistakes_as_sentences


def main(argv: list[str]) -> None:
    """Train with the options of a config, on a reward that needs no answer."""
    with mistakes_as_sentences():
        from areal_core.config import GRPOConfig
        from areal_core.data import get_dataset
        from areal_core.trainer.rl import PPOTrainer
        from areal_debug.wiring import wire

        config, hooks = wire(argv, GRPOConfig)
        with PPOTrainer(config, get_dataset(config.train_dataset), **hooks) as trainer:
            trainer.train(workflow_kwargs={"reward_fn": even_share})


if __name__ == "__main__":
    main(sys.argv)
