"""Train a few steps on fixed rows, divided over the ranks; print losses, norms and checksums.

Arguments: model folder, tokens per micro-batch, checkpoint folder to write after the first step
("" for none).
"""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from areal_core.engine.checkpoint.distributed import load_checkpoint, save_checkpoint
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.model import load_model
from areal_core.engine.optimizer import build_optimizer, build_schedule
from areal_core.engine.ranks import Ranks, join_ranks
from areal_core.engine.routers import Routers
from areal_core.engine.sharding import shard_model

LENGTHS = [12, 5, 20, 9, 3]


def rows(rank: int = 0, world_size: int = 1) -> dict[str, torch.Tensor]:
    """Return every world_size-th of five rows of different lengths, next-token aligned.

    With two ranks: three and two rows.
    """
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(5, 100, mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    trained = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None] - 1
    batch = {"input_ids": ids * mask, "attention_mask": mask, "loss_mask": trained.int()}
    return {key: tensor[rank::world_size] for key, tensor in batch.items()}


def make_engine(
    ranks: Ranks, model: str, max_tokens: int, dtype: torch.dtype = torch.float32, load: Callable = load_model
) -> FSDPEngine:
    return engine_of(shard_model(load(model), ranks, dtype=dtype), ranks, max_tokens, dtype)


def engine_of(
    sharded: PreTrainedModel,
    ranks: Ranks,
    max_tokens: int,
    dtype: torch.dtype = torch.float32,
    routers: Routers | None = None,
) -> FSDPEngine:
    optimizer = build_optimizer(
        sharded.parameters(), kind="adam", lr=1e-2, weight_decay=0.01, beta1=0.9, beta2=0.999, eps=1e-8
    )
    schedule = build_schedule(
        optimizer, kind="linear", total_steps=10, warmup_proportion=0.0, min_lr_ratio=0.0
    )
    given = {"optimizer": optimizer, "schedule": schedule, "routers": routers}
    return FSDPEngine(sharded, ranks, dtype, max_tokens_per_mb=max_tokens, **given)


def train_step(engine: FSDPEngine, batch: dict[str, torch.Tensor]) -> dict:
    result = engine.train_batch(
        batch,
        lambda logprobs, entropy, flat: -(logprobs * flat["loss_mask"]).sum(),
        lambda part: part["loss_mask"].sum(),
    )
    engine.step_schedule()
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "num_micro_batches": len(result.micro_batches),
        "checksums": engine.checksums(),
    }


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare gathered gradients, each to 1e-5 of its norm."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def assert_same_steps(found: list[dict], expected: list[dict]) -> None:
    """Compare losses and norms of gradients within the rounding of sums over ranks."""
    for one, other in zip(found, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


def main(model: str, max_tokens: str, checkpoint: str) -> object:
    ranks = join_ranks("cpu")
    engine = make_engine(ranks, model, int(max_tokens))
    batch = rows(ranks.rank, ranks.world_size)
    steps = [train_step(engine, batch)]
    if checkpoint:
        save_checkpoint(checkpoint, {"actor": engine}, {"steps_done": 1})
    steps += [train_step(engine, batch) for _ in range(2)]
    if checkpoint:
        again = make_engine(ranks, model, int(max_tokens))
        state = load_checkpoint(checkpoint, {"actor": again})
        resumed = [train_step(again, batch) for _ in range(2)]
        steps = {"straight": steps, "state": state, "resumed": resumed}
    return steps
