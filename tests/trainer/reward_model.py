"""A reward model with a random head, and PPO on its scores."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from areal_core.config import PPOConfig, load_expr_config
from areal_core.data import get_dataset
from areal_core.reward import no_reward
from areal_core.trainer.rl import PPOTrainer
from tests.trainer.critic_program import keep

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
    return keep(kept, "batch", "batch")


@torch.no_grad()
def scores_of(scorer: Path, rows: Sequence[list[int]]) -> Tensor:
    """Return the score of each row by the classifier's own forward, one row at a time; [rows]."""
    model = AutoModelForSequenceClassification.from_pretrained(scorer, dtype=torch.float32).eval()
    hidden = [model.model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in rows]
    return model.score(torch.stack(hidden))[:, 0]


def train(trainer: PPOTrainer) -> None:
    """Train on the scores alone."""
    trainer.train(workflow_kwargs={"reward_fn": no_reward})
