"""Direct preference optimisation: the policy learns from pairs of answers of which one was preferred, without a reward model.

    areal-debug train examples/dpo.py --config examples/dpo.yaml

Any JSONL file with `chosen` and `rejected`, and `prompt` or `messages` before them, can stand in place of the dataset.
"""

import sys

from areal_core.config import DPOConfig, load_expr_config
from areal_core.dataset import get_dataset
from areal_core.trainer.build import load_tokenizer
from areal_core.trainer.dpo import DPOTrainer


def main(argv: list[str]) -> None:
    config, _ = load_expr_config(argv, DPOConfig)
    tokenizer = load_tokenizer(config)
    with DPOTrainer(config, get_dataset(config.train_dataset, tokenizer=tokenizer)) as trainer:
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1:])
