"""Train PPO with a critic on synthetic answers of several turns, on the ranks of this job.

Rank 0 prints the statistics of each step as JSON.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from areal_core.config import PPOConfig, load_expr_config
from areal_core.data.batch import Batch, select_rows
from areal_core.engine.ranks import Ranks
from areal_core.testing import make_tiny_model
from areal_core.trainer.rl import PPOTrainer
from replayer.preflight.real_steps import RandomRollouts

TINY = Path(__file__).parents[1] / "debug" / "tiny.yaml"
NUM_ROWS, STOP, LENGTH = 8, 0, 1
# A preset with overrides: returns differ from rewards, and SGD makes one step of known size on all
# rows.
PPO = [
    "algorithm=ppo",
    "actor.discount=0.97",
    "actor.gae_lambda=0.9",
    "actor.optimizer.type=sgd",
    "actor.optimizer.lr=0.1",
    "actor.ppo_n_minibatches=1",
]


class Conversations(RandomRollouts):
    """Rows with every fifth and sixth token from a tool, every third row truncated; sharded.

    The rows of a prompt begin with the same two tokens.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(vocab_size=100, num_prompts=NUM_ROWS // 2, num_samples=2, longest=24, seed=3)
        share, rank = NUM_ROWS // ranks.data_parallel_size, ranks.data_parallel_rank
        self.rows = range(rank * share, (rank + 1) * share)

    def next_batch(self, step: int, version: int) -> Batch:
        batch = super().next_batch(step, version)
        own = (torch.arange(batch["loss_mask"].shape[1]) % 6 < 4) & batch["loss_mask"].bool()
        written = {"loss_mask": own.int(), "logprobs": torch.where(own, batch["logprobs"], 0.0)}
        written["versions"] = torch.where(own, version, torch.where(batch["attention_mask"], -1, 0)).int()
        ids = batch["input_ids"].clone()
        ids[:, :2] = ids[::2, :2].repeat_interleave(2, 0)
        written["input_ids"] = ids
        written["finish_reason"] = torch.where(torch.arange(NUM_ROWS) % 3 == 0, LENGTH, STOP).int()
        return select_rows(batch | written, list(self.rows))


def build(
    model: Path,
    folder: Path,
    num_steps: int,
    *overrides: str,
    observers: Sequence[Callable[..., Any]] = (),
    rollouts: Callable[[Ranks], RandomRollouts] = Conversations,
    **options: Any,
) -> PPOTrainer:
    """Build a trainer of `num_steps` steps with its files under `folder`."""
    given = [
        f"cluster.fileroot={folder}",
        f"actor.path={model}",
        f"total_train_steps={num_steps}",
        *PPO,
        *overrides,
    ]
    config, _ = load_expr_config(["--config", str(TINY), *given], PPOConfig)
    source = {"source": lambda trainer: rollouts(trainer.ranks), "total_steps": num_steps}
    return PPOTrainer(config, observers=observers, print_steps=False, **source, **options)


def make_teacher(folder: Path, **size: int) -> Path:
    """Write a model of other random weights, scaled up because random models are nearly uniform."""
    make_tiny_model(folder, seed=1, **size)
    teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        teacher.model.norm.weight *= 6
    teacher.save_pretrained(folder)
    return folder


def keep(kept: list[Any], event: str, fact: str) -> Callable[[PPOTrainer], Callable[..., None]]:
    """Return a factory of an observer that appends a fact of each event of a kind to a list."""

    def observe(what: str, **facts: Any) -> None:
        if what == event:
            kept.append(facts[fact])

    return lambda trainer: observe


def measure_into(measured: list[dict[str, float]]) -> Callable[[PPOTrainer], Callable[..., None]]:
    return keep(measured, "step", "stats")


def norms_of_weights(trainer: PPOTrainer) -> dict[str, float]:
    """Return the norm of every parameter of actor and critic; a collective."""
    return {
        f"{engine}.{name}": float(tensor.double().norm())
        for engine, trained in trainer.engines.items()
        for name, tensor in trained.named_full_tensors()
    }


def main(model: str, folder: str, *overrides: str) -> object:
    measured: list[dict[str, float]] = []
    with build(Path(model), Path(folder), 3, *overrides, observers=[measure_into(measured)]) as trainer:
        trainer.train()
        return {"steps": measured, "weights": norms_of_weights(trainer)}
