"""Train on random tokens on all ranks of the job, with bits flipped on purpose; perhaps record it.

One argument, JSON: folder, model, and what `run` takes. Rank 0 prints what it returns.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from areal_core.config import PPOConfig, config_from_dict
from areal_core.errors import MiscomputedError
from areal_core.testing.bit_flips import Flip, plant
from areal_core.trainer.rl import PPOTrainer
from areal_debug.wiring import make_recorder
from replayer.preflight.real_steps import RandomRollouts

TINY = Path(__file__).parents[1] / "debug" / "tiny.yaml"


class Rollouts(RandomRollouts):
    def next_batch(self, step: int, version: int) -> dict[str, Any]:
        batch = super().next_batch(step, version)
        return batch | {"prompt_id": batch["prompt_id"] + 1000 * step}  # no prompt occurs twice


def make_config(folder: str, model: str, num_steps: int, changes: dict[str, Any]) -> PPOConfig:
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
    flips: list[dict[str, Any]] | tuple[()] = (),
    changes: dict[str, Any] | None = None,
    longest: int = 16,
) -> dict[str, Any]:
    """Return the message of the error that ended the run, and each step's facts."""
    config = make_config(folder, model, num_steps, changes or {})
    steps: list[dict[str, Any]] = []

    def keep(trainer: PPOTrainer):
        def observe(event: str, **facts: Any) -> None:
            if event == "step":
                steps.append(
                    {"checksums": facts["checksums"], "plan": facts["plan"], "stats": facts["stats"]}
                )

        return observe

    observers = [keep, *(plant(Flip(**flip)) for flip in flips)]
    if config.debug.dump_rollout_data:
        observers.append(make_recorder)
    error = None
    with PPOTrainer(
        config,
        source=lambda t: Rollouts(100, 2, 4, longest, seed=1, rank=t.ranks.data_parallel_rank),
        observers=observers,
        total_steps=num_steps,
        print_steps=False,
    ) as trainer:
        try:
            trainer.train()
        except MiscomputedError as raised:
            error = str(raised)
        return {"error": error, "steps": steps, "rank": trainer.ranks.rank}


if __name__ == "__main__":
    found = run(**json.loads(sys.argv[1]))
    if found["rank"] == 0:
        print(json.dumps(found))
