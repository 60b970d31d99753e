"""Direct preference optimisation: train a policy on pairs of a chosen and a rejected answer.

    areal-debug train examples/dpo.py --config examples/dpo.yaml

The dataset can be any JSONL file with `chosen`, `rejected`, and `prompt` or `messages` before them.
"""

import sys

from areal_core.config import DPOConfig
from areal_core.data import get_dataset
from areal_core.trainer.build import load_tokenizer
from areal_core.trainer.dpo import DPOTrainer
from areal_debug.wiring import wire


def main(argv: list[str]) -> None:
    config, hooks = wire(argv, DPOConfig)
    tokenizer = load_tokenizer(config)
    with DPOTrainer(config, get_dataset(config.train_dataset, tokenizer=tokenizer), **hooks) as trainer:
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1:])
