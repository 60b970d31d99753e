"""Train a tiny model with the functions of `algorithm.py`, on two ranks of this machine.

areal-debug train examples/custom_algorithm/train.py --dump-rollout record
areal-debug replay record --code examples/custom_algorithm
"""

import sys
from pathlib import Path

from areal_core.config import GRPOConfig
from areal_core.data import get_dataset
from areal_core.testing import make_tiny_model
from areal_core.trainer.rl import PPOTrainer
from areal_debug.wiring import wire


def main(argv: list[str]) -> None:
    config, hooks = wire(argv, GRPOConfig)
    with PPOTrainer(config, get_dataset(config.train_dataset), **hooks) as trainer:
        trainer.train(
            workflow="algorithm.WithSystemPrompt", workflow_kwargs={"reward_fn": "algorithm.even_share"}
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["--make-model"]:
        print(make_tiny_model(Path("runs/tiny")))
    else:
        main(sys.argv)
