"""The clipped value loss of PPO, on packed tokens, and the explained variance of the values."""

import math

import torch
from torch import Tensor

from areal_core.algorithm.normalization import SumOverRanks, on_one_rank

# Of float32: returns whose relative standard deviation is smaller than this are equal.
ROUNDING = 2.0**-23


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor, *, eps_clip: float = 0.5
) -> tuple[Tensor, dict[str, Tensor]]:
    """(sum over the loss mask, per-token statistics without gradient); all inputs [tokens].

    `max((V - R)^2, (V_clipped - R)^2) / 2` with
    `V_clipped = V_old + clamp(V - V_old, -eps_clip, eps_clip)`: the pessimistic counterpart of the
    policy clip, as in the implementation that accompanies arXiv 1707.06347. Statistics: loss,
    clip_mask.
    """
    mask = loss_mask.bool()
    clipped_values = old_values + (values - old_values).clamp(-eps_clip, eps_clip)
    unclipped, clipped = 0.5 * (values - returns) ** 2, 0.5 * (clipped_values - returns) ** 2
    loss = torch.where(mask, torch.maximum(unclipped, clipped), 0.0)
    return loss.sum(), {"loss": loss.detach(), "clip_mask": mask & (clipped > unclipped).detach()}


def explained_variance(
    values: Tensor, returns: Tensor, loss_mask: Tensor, sum_over_ranks: SumOverRanks = on_one_rank
) -> float:
    """`1 - Var(R - V) / Var(R)` over the loss masks of all ranks; inputs of one shape.

    1 for values that predict every return, 0 for a constant, negative for values that are worse
    than a constant; nan where all returns are equal. A collective when `sum_over_ranks` is one.
    """
    mask = loss_mask.bool()
    targets, errors = returns[mask].double(), (returns - values)[mask].double()  # [masked tokens]
    moments = [targets.sum(), (targets**2).sum(), errors.sum(), (errors**2).sum(), mask.sum().double()]
    *sums, count = sum_over_ranks(torch.stack(moments)).tolist()
    if count == 0:
        return math.nan
    target, target_square, error, error_square = (total / count for total in sums)
    variance = target_square - target**2
    if variance <= ROUNDING**2 * target_square:
        return math.nan
    return 1 - (error_square - error**2) / variance
