"""Run real steps of a configured run on random tokens, and keep their bits.

config ─> model, trainer, batches of random tokens ─> steps ─> bits ─┬─> equal? ──> report
                               again, in other processes ────────────┘  no ─> noise floor of each parameter
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from areal_core.config import PPOConfig
from areal_core.engine.determinism import environment_at_start
from areal_core.trainer.rl import Observer, PPOTrainer
from recorder import Outcome, OutcomeObserver
from replayer.preflight.checks import Process
from replayer.preflight.random_rollouts import random_rollouts
from replayer.request import without_side_effects


@dataclass(frozen=True)
class RunBits:
    """Result of some steps on this rank: their outcomes, and the local shards of some parameters.

    `weights` after the last step and `gradients` of its last minibatch are NumPy arrays by
    parameter name, of the requested parameters. `process` describes the rank during the steps.
    """

    outcomes: tuple[Outcome, ...]
    process: Process
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)


def run_steps(config: PPOConfig, num_steps: int = 1, keep: Sequence[str] = ()) -> RunBits:
    """Run real steps on random tokens from the first weights; a collective.

    Args:
        keep: names of the parameters whose weights after the steps, and gradients, are returned.
    """
    config = without_side_effects(config)
    outcomes: list[Outcome] = []
    gradients: dict[str, np.ndarray] = {}

    def keep_gradients(trainer: PPOTrainer) -> Observer:
        def observe(event: str, **facts: Any) -> None:
            if event == "gradients":
                parameters = dict(trainer.actor.model.named_parameters())
                gradients.update({n: local_array(g) for n in keep if (g := parameters[n].grad) is not None})

        return observe

    with PPOTrainer(
        config,
        source=lambda trainer: random_rollouts(config, trainer),
        observers=[lambda trainer: OutcomeObserver(outcomes.append), keep_gradients],
        total_steps=max(config.total_train_steps or 100, num_steps),
        stop_after=num_steps - 1,
        print_steps=False,
    ) as trainer:
        trainer.train()
        parameters = dict(trainer.actor.model.named_parameters())
        weights = {name: local_array(parameters[name]) for name in keep}
        return RunBits(tuple(outcomes), process_of(trainer), weights, gradients)


def process_of(trainer: PPOTrainer) -> Process:
    options = trainer.actor.model.config.to_dict()
    return Process(
        rank=trainer.ranks.rank,
        world_size=trainer.ranks.world_size,
        device=trainer.ranks.device.type,
        now=dict(os.environ),
        at_start=environment_at_start(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        algorithms_deterministic=torch.are_deterministic_algorithms_enabled(),
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        num_threads=torch.get_num_threads(),
        num_cores=os.cpu_count() or 1,
        dropouts={n: v for n, v in options.items() if isinstance(v, float) and "drop" in n},
    )


def local_array(tensor: torch.Tensor) -> np.ndarray:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().float().cpu().numpy().copy()


def save_bits(bits: RunBits, folder: Path, rank: int) -> None:
    """Save the kept arrays in `folder` for the process that compares."""
    arrays = {f"weights:{name}": array for name, array in bits.weights.items()}
    arrays |= {f"gradients:{name}": array for name, array in bits.gradients.items()}
    if arrays:
        save_file(
            {n: torch.from_numpy(a) for n, a in arrays.items()}, folder / f"values-{rank:05d}.safetensors"
        )
