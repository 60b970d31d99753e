"""The optimizer steps of one batch: its rows are divided into minibatches, one for each step."""

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from areal_core.algorithm.losses import explained_variance, value_loss
from areal_core.config import PPOCriticConfig
from areal_core.data.batch import Batch, select_rows, sequence_lengths, split_rows
from areal_core.engine.fsdp import FSDPEngine, LossFunction, TrainResult, ignore_event
from areal_core.engine.ranks import Ranks
from areal_core.telemetry.stats import Stats
from areal_core.trainer.nonfinite import NonFiniteGuard


def num_loss_tokens(batch: Batch) -> Tensor:
    """Return the number of tokens in the loss mask: the loss denominator of a batch."""
    return batch["loss_mask"].sum()


def update(
    engine: FSDPEngine,
    inputs: Batch,
    num_minibatches: int,
    loss: LossFunction,
    stats: Stats,
    observe: Callable[..., None] = ignore_event,
    weigh: Callable[[Batch], Tensor] = num_loss_tokens,
    on_skipped: Callable[..., None] | None = None,
) -> list[dict[str, Any]]:
    """Train on a batch in several optimizer steps; a collective.

    Args:
        inputs: next-token aligned rows of this rank, with the keys that `loss` needs.
        weigh: returns the denominator of the loss of rows.
        observe, on_skipped: as in `train_minibatch`.

    Returns:
        The plan that was followed, in JSON types: rows, micro-batches and results per
        minibatch.
    """
    plan = []
    trees = engine.units(inputs) if engine.shares_prefixes else None
    for index, rows in enumerate(divide_into_minibatches(inputs, num_minibatches, engine.ranks, trees)):
        result, followed = train_minibatch(
            engine, inputs, rows, loss, observe, weigh, on_skipped, minibatch=index
        )
        stats.scalar(loss=result.loss)
        record_result(stats, result)
        plan.append(followed)
    return plan


def record_result(stats: Stats, result: TrainResult) -> None:
    """Record the statistics of an optimizer step, but for its loss."""
    stats.scalar(
        grad_norm=result.grad_norm,
        lr=result.lr,
        update_successful=float(result.update_successful),
        num_micro_batches=len(result.micro_batches),
    )


def train_minibatch(
    engine: FSDPEngine,
    inputs: Batch,
    rows: list[int],
    loss: LossFunction,
    observe: Callable[..., None],
    weigh: Callable[[Batch], Tensor],
    on_skipped: Callable[..., None] | None,
    minibatch: int = 0,
) -> tuple[TrainResult, dict[str, Any]]:
    """Take one optimizer step on some rows of a batch; a collective.

    Args:
        observe: receives the events of `FSDPEngine.train_batch`, and `micro_batch` after the step.
        on_skipped: called on every rank for an optimizer step that was not taken, or had a `fault`,
            with `engine`, `inputs`, `loss` and `weigh`, and that, its `minibatch` and `rows` by
            name.

    Returns:
        The result, and the plan of the step in JSON types.
    """
    observe_engine = partial(observe, minibatch=minibatch, rows=rows)
    result = engine.train_batch(select_rows(inputs, rows), loss, weigh, observe_engine)
    fault = result.fault
    if (fault is not None or not result.update_successful) and on_skipped is not None:
        on_skipped(engine, inputs, loss, weigh, minibatch=minibatch, rows=rows, fault=fault)
    for number, micro in enumerate(result.micro_batches):
        observe(
            "micro_batch",
            minibatch=minibatch,
            micro_batch=number,
            rows=[rows[row] for row in micro.rows],
            num_tokens=micro.num_tokens,
            loss=micro.loss,
            weight=micro.weight,
        )
    plan = {
        "rows": rows,
        "micro_batches": [[rows[row] for row in micro.rows] for micro in result.micro_batches],
        "loss_denominator": result.total_weight,
        "lr": result.lr.hex(),
        "grad_norm": result.grad_norm.hex(),
        "loss": result.loss.hex(),
    }
    if result.sums is not None:
        plan["sums"] = [[sums.document() for sums in each] for each in result.sums]
    if fault is not None:
        plan["fault"] = asdict(fault)
    if engine.shares_prefixes:
        plan["tree_tokens"] = [micro.num_computed for micro in result.micro_batches]
    return result, plan


def divide_into_minibatches(
    batch: Batch, num_minibatches: int, ranks: Ranks, trees: list[list[int]] | None = None
) -> list[list[int]]:
    """Return the rows of each optimizer step, equally many steps on every rank; a collective.

    Args:
        trees: rows that share tokens; they stay together where every rank has enough trees.
    """
    lengths = sequence_lengths(batch).tolist()
    units = [[row] for row in range(len(lengths))]
    if trees is not None and ranks.maximum(num_minibatches - len(trees)) <= 0:
        units = trees
    sums = [sum(lengths[row] for row in unit) for unit in units]
    groups = split_rows(sums, None, min(num_minibatches, ranks.maximum(len(units))), ranks.maximum)
    return [[row for unit in group for row in units[unit]] for group in groups]


def critic_values(critic: FSDPEngine, batch: Batch, stats: Stats) -> Tensor:
    """Compute the values [B, T] of all tokens of a batch; a collective."""
    with stats.timing("critic_values"):
        return critic.compute_values(batch)


def update_critic(
    critic: FSDPEngine,
    inputs: Batch,
    options: PPOCriticConfig,
    stats: Stats,
    guard: NonFiniteGuard,
    step: int,
) -> list[dict[str, Any]]:
    """Train the critic on `returns`, clipped around `values` (both [B, T]); a collective.

    Records statistics under `ppo_critic/` and returns the plan of `update`.
    """
    with stats.scope("ppo_critic"), stats.timing("critic_train_step"):
        stats.scalar(eps_clip=options.eps_clip, mask_no_eos_with_zero=float(options.mask_no_eos_with_zero))
        explained = explained_variance(
            inputs["values"], inputs["returns"], inputs["loss_mask"], critic.ranks.sum
        )
        if not math.isnan(explained):
            stats.scalar(explained_variance=explained)
        loss = partial(critic_loss, eps_clip=options.eps_clip, stats=stats)
        skipped = partial(guard.skipped, "critic", step=step)
        return update(critic, inputs, options.ppo_n_minibatches, loss, stats, on_skipped=skipped)


def critic_loss(values: Tensor, flat: Batch, *, eps_clip: float, stats: Stats) -> Tensor:
    mask, old_values, returns = flat["loss_mask"].bool(), flat["values"], flat["returns"]
    loss, details = value_loss(values, old_values, returns, mask, eps_clip=eps_clip)
    stats.denominator(
        n_tokens=torch.ones_like(mask), n_valid_tokens=mask, clipped_tokens=details["clip_mask"]
    )
    stats.stat(
        "n_valid_tokens",
        new_value=values,
        old_value=old_values,
        target_value=returns,
        critic_loss=details["loss"],
        clip_ratio=details["clip_mask"].float(),
    )
    stats.stat("clipped_tokens", clipped_new_value=values, clipped_old_value=old_values)
    return loss
