"""Supervised fine-tuning on the solutions of GSM8K, with the validation loss on its test split.

    areal-debug train examples/gsm8k_sft.py --config examples/gsm8k_sft.yaml

The dataset can be any JSONL file with `prompt` and `completion`, `question` and `answer`, or
`messages` and `answer`.
"""

import sys

from areal_core.config import SFTConfig
from areal_core.data import get_dataset
from areal_core.trainer.build import load_tokenizer
from areal_core.trainer.sft import SFTTrainer
from areal_debug.wiring import wire


def main(argv: list[str]) -> None:
    config, hooks = wire(argv, SFTConfig)
    tokenizer = load_tokenizer(config)
    with SFTTrainer(config, get_dataset(config.train_dataset, tokenizer=tokenizer), **hooks) as trainer:
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1:])
