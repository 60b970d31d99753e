"""Train a reward model on pairs of a chosen and a rejected answer; it scores single answers.

    areal-debug train examples/reward_model.py --config examples/reward_model.yaml

The dataset can be any JSONL file with `chosen`, `rejected`, and `prompt` or `messages` before them.
"""

import sys

from areal_core.config import RWConfig
from areal_core.data import get_dataset
from areal_core.trainer.build import load_tokenizer
from areal_core.trainer.reward_model import RWTrainer
from areal_debug.wiring import wire


def main(argv: list[str]) -> None:
    config, hooks = wire(argv, RWConfig)
    tokenizer = load_tokenizer(config)
    with RWTrainer(config, get_dataset(config.train_dataset, tokenizer=tokenizer), **hooks) as trainer:
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1:])
