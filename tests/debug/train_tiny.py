"""A user script: a tiny model, the embedded engine, and a custom reward."""

import os
import signal
import sys
from pathlib import Path

from areal_core.config import GRPOConfig
from areal_core.data import get_dataset
from areal_core.trainer.rl import PPOTrainer
from areal_debug.wiring import wire


def kill_in_step(step: int):
    """Build an observer that kills the process after the first micro-batch of a step."""

    def observe(event: str, **facts: object) -> None:
        if event == "micro_batch" and facts["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda trainer: observe


def print_num_checksums(event: str, **facts: object) -> None:
    if event == "step":
        print(f"observed checksums of {len(facts['checksums'])} parameters", flush=True)


if __name__ == "__main__":
    config, hooks = wire(sys.argv, GRPOConfig)
    if "KILL_IN_STEP" in os.environ:
        hooks["observers"].append(kill_in_step(int(os.environ["KILL_IN_STEP"])))
    if os.environ.get("OBSERVE_ON_RANK", "") == os.environ.get("RANK", "0"):
        hooks["observers"].append(lambda trainer: print_num_checksums)
    with PPOTrainer(config, get_dataset(config.train_dataset), **hooks) as trainer:
        trainer.train(workflow_kwargs={"reward_fn": f"{Path(__file__).parent}/rewards.py:even_share"})
