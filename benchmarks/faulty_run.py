"""A run on random tokens with faults planted on purpose, on all ranks of the job; recorded.

One argument, JSON: what `run` takes. Rank 0 prints what it returns. `tests/replayer/test_faulty.py`
uses it, too.
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from areal_core.config import PPOConfig, config_from_dict
from areal_core.data.batch import Batch
from areal_core.errors import MiscomputedError, NonFiniteError
from areal_core.testing.bit_flips import PRODUCTS, Flip, plant
from areal_core.trainer.observed import Observer
from areal_core.trainer.rl import PPOTrainer
from areal_debug.wiring import make_recorder
from replayer.preflight.real_steps import RandomRollouts

TINY = Path(__file__).parents[1] / "tests" / "debug" / "tiny.yaml"


class Rollouts(RandomRollouts):
    """Random rows, the same in each run, whose prompts occur in one step only."""

    def next_batch(self, step: int, version: int) -> Batch:
        batch = super().next_batch(step, version)
        return batch | {"prompt_id": batch["prompt_id"] + 1000 * step}


class Noise(TorchDispatchMode):
    """Rounds an element of some matrix products differently, as atomics do: other ones each run."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share, self.chance = share, random.SystemRandom()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func).startswith(PRODUCTS) and self.chance.random() < self.share:
            flat = result.view(-1)
            for at in [self.chance.randrange(len(flat)) for _ in range(self.chance.randrange(1, 8))]:
                towards = torch.tensor(self.chance.choice((-1e30, 1e30)))
                flat[at] = torch.nextafter(flat[at], towards)
        return result


def noise_of(share: float) -> Callable[[PPOTrainer], Observer]:
    """Return the factory of an observer that adds noise to each update."""

    def make(trainer: PPOTrainer) -> Observer:
        mode = Noise(share)

        def observe(event: str, **facts: Any) -> None:
            if event == "advantages":
                mode.__enter__()
            elif event == "step":
                mode.__exit__(None, None, None)

        return observe

    return make


def make_config(folder: str, model: str, num_steps: int, changes: dict[str, Any]) -> PPOConfig:
    """Return the config of a tiny run with two micro-batches or more in a minibatch."""
    tree = yaml.safe_load(TINY.read_text())
    tree |= {"cluster": {"fileroot": folder}, "total_train_steps": num_steps}
    tree["actor"] |= {"path": model, "mb_spec": {"max_tokens_per_mb": 24}}
    for name, value in changes.items():
        *sections, option = name.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[option] = value
    return config_from_dict(tree, PPOConfig)


def run(
    folder: str,
    model: str,
    num_steps: int = 2,
    flips: list[dict[str, Any]] | None = None,
    changes: dict[str, Any] | None = None,
    noise: float = 0.0,
) -> dict[str, Any]:
    """Train; return this rank, the error that ended the run, and weights after the last step.

    Args:
        flips: as `bit_flips.Flip`. changes: options by name.
        noise: share of matrix products that are rounded in another way in each run.
    """
    config = make_config(folder, model, num_steps, changes or {})
    checksums: dict[str, str] = {}

    def keep(trainer: PPOTrainer) -> Observer:
        def observe(event: str, **facts: Any) -> None:
            if event == "step":
                checksums.update(facts["checksums"])

        return observe

    observers = [keep, *(plant(Flip(**flip)) for flip in flips or ())]
    observers += [noise_of(noise)] if noise else []
    observers += [make_recorder] if config.debug.dump_rollout_data else []
    error = None
    with PPOTrainer(
        config,
        source=lambda t: Rollouts(100, 2, 4, 16, seed=1, rank=t.ranks.data_parallel_rank),
        observers=observers,
        total_steps=num_steps,
        print_steps=False,
    ) as trainer:
        try:
            trainer.train()
        except (MiscomputedError, NonFiniteError) as raised:
            error = str(raised)
        return {"rank": trainer.ranks.rank, "error": error, "checksums": checksums}


if __name__ == "__main__":
    found = run(**json.loads(sys.argv[1]))
    if found["rank"] == 0:
        print(json.dumps(found))
