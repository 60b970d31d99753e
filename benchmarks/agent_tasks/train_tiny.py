"""Train a tiny run; one whose trial is named `changed` loses half of its gradients in step 1."""

import sys
from pathlib import Path
from typing import Any

from areal_core.config import GRPOConfig
from areal_core.data import get_dataset
from areal_core.trainer.rl import PPOTrainer
from areal_debug.wiring import wire

REWARDS = Path(__file__).parents[2] / "tests/debug/rewards.py"

if __name__ == "__main__":
    config, hooks = wire(sys.argv, GRPOConfig)
    with PPOTrainer(config, get_dataset(config.train_dataset), **hooks) as trainer:

        def drop(event: str, **facts: Any) -> None:
            if event == "gradients" and facts["step"] == 1 and config.trial_name == "changed":
                for parameter in list(trainer.actor.model.parameters())[::2]:
                    parameter.grad.zero_()

        trainer.observers.insert(0, drop)
        trainer.train(workflow_kwargs={"reward_fn": f"{REWARDS}:even_share"})
