"""Summaries of posts, first of three steps: supervised fine-tuning on summaries of the authors.

python examples/tldr_data.py runs/tldr
areal-debug train examples/tldr_sft.py --config examples/tldr_sft.yaml
"""

import sys

from areal_core.config import SFTConfig
from areal_core.data import get_dataset
from areal_core.trainer.build import load_tokenizer
from areal_core.trainer.sft import SFTTrainer
from areal_debug.wiring import wire


def main(argv: list[str]) -> None:
    config, hooks = wire(argv, SFTConfig)
    with SFTTrainer(
        config, get_dataset(config.train_dataset, tokenizer=load_tokenizer(config)), **hooks
    ) as trainer:
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1:])
