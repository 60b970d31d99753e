"""Train PPO on the scores of a reward model, on the ranks of this job.

Rank 0 prints the scores of the rows of the first step as JSON.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from areal_core.config import PPOConfig, load_expr_config
from areal_core.data import get_dataset
from areal_core.reward import no_reward
from areal_core.trainer.rl import PPOTrainer
from areal_core.trainer.scored_rollouts import SCORE

TINY = Path(__file__).parents[1] / "debug" / "tiny.yaml"


def make_reward_model(model: Path, folder: Path) -> Path:
    """Write a reward model with a random head on the weights and tokenizer of a language model."""
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    scorer = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        scorer.score.weight.normal_()
    scorer.save_pretrained(folder)
    return folder


def build(
    model: Path, scorer: Path, folder: Path, *overrides: str, observers: Sequence[Callable[..., Any]] = ()
) -> PPOTrainer:
    """Build a trainer of two steps with its files under `folder`."""
    given = [f"cluster.fileroot={folder}", f"actor.path={model}", "total_train_steps=2"]
    given += [f"reward_model.path={scorer}", "reward_model.dtype=float32", "reward_model.weight=0.5"]
    given += ["evaluator.freq_steps=1", *overrides]
    config, _ = load_expr_config(["--config", str(TINY), *given], PPOConfig)
    rows = get_dataset(config.train_dataset)
    return PPOTrainer(config, rows, rows[:3], observers=observers, print_steps=False)


def keep_batches(kept: list[dict[str, Any]]) -> Callable[[PPOTrainer], Callable[..., None]]:
    """Return a factory of an observer that appends the batch of each step to a list."""

    def observe(event: str, **facts: Any) -> None:
        if event == "batch":
            kept.append(facts["batch"])

    return lambda trainer: observe


def train(trainer: PPOTrainer) -> None:
    """Train on the scores alone."""
    trainer.train(workflow_kwargs={"reward_fn": no_reward})


def scores_by_name(batch: dict[str, Any]) -> dict[str, float]:
    """Return the score of each row by the ids of its prompt and sample."""
    names = zip(batch["prompt_id"].tolist(), batch["sample_id"].tolist(), strict=True)
    return {f"{p}, {s}": score for (p, s), score in zip(names, batch[SCORE].tolist(), strict=True)}


def main(model: str, scorer: str, folder: str, *overrides: str) -> object:
    batches: list[dict[str, Any]] = []
    with build(Path(model), Path(scorer), Path(folder), *overrides, observers=[keep_batches(batches)]) as t:
        train(t)
        found = t.ranks.gather_objects(scores_by_name(batches[0]))
        return {name: score for rank in found for name, score in rank.items()}
