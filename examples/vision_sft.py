"""Supervised fine-tuning of a vision model on pictures, questions and answers.

areal-debug train examples/vision_sft.py --config examples/vision_shapes_sft.yaml
"""

import sys

from areal_core.config import SFTConfig
from areal_core.data import get_dataset
from areal_core.data.processor import load_processor
from areal_core.trainer.sft import SFTTrainer
from areal_debug.wiring import wire


def main(argv: list[str]) -> None:
    config, hooks = wire(argv, SFTConfig)
    processor = load_processor(config.tokenizer_path or config.actor.path)
    rows = get_dataset(config.train_dataset, processor=processor)
    valid = config.valid_dataset and get_dataset(config.valid_dataset, processor=processor)
    with SFTTrainer(config, rows, valid, **hooks) as trainer:
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1:])
