"""The clipped value loss of PPO, on packed tokens."""

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor, *, eps_clip: float = 0.5
) -> tuple[Tensor, dict[str, Tensor]]:
    """(sum over trainable tokens, per-token statistics); all inputs [tokens].

    `max((V - R)^2, (V_clipped - R)^2) / 2` with `V_clipped = V_old + clamp(V - V_old, -eps_clip, eps_clip)`: the pessimistic
    twin of the policy clip, as in the implementation that accompanies arXiv 1707.06347. Statistics: loss, clip_mask.
    """
    mask = loss_mask.bool()
    clipped_values = old_values + (values - old_values).clamp(-eps_clip, eps_clip)
    unclipped, clipped = 0.5 * (values - returns) ** 2, 0.5 * (clipped_values - returns) ** 2
    loss = torch.where(mask, torch.maximum(unclipped, clipped), 0.0)
    return loss.sum(), {"loss": loss.detach(), "clip_mask": mask & (clipped > unclipped)}
