"""The critic of PPO: a value per position, trained on the returns of the policy's batch.

Old values are those of the weights before the update, which the advantages were computed from; the
loss is clipped around them.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from areal_core.algorithm.losses import explained_variance, value_loss
from areal_core.config import PPOCriticConfig
from areal_core.data.batch import Batch
from areal_core.engine.fsdp import FSDPEngine
from areal_core.telemetry import Stats
from areal_core.trainer.nonfinite import NonFiniteGuard
from areal_core.trainer.update import update


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
