"""Summaries of posts, second of three steps: a reward model on pairs of summaries.

    areal-debug train examples/tldr_reward.py --config examples/tldr_reward.yaml

It starts from the model of `tldr_sft.py`, with a score head in place of the output layer.
"""

import sys

from areal_core.config import RWConfig
from areal_core.data import get_dataset
from areal_core.trainer.build import load_tokenizer
from areal_core.trainer.reward_model import RWTrainer
from areal_debug.wiring import wire


def main(argv: list[str]) -> None:
    config, hooks = wire(argv, RWConfig)
    with RWTrainer(
        config, get_dataset(config.train_dataset, tokenizer=load_tokenizer(config)), **hooks
    ) as trainer:
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1:])
