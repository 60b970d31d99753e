"""The clipped policy loss of PPO and its relatives, on packed tokens.

The loss is a sum over tokens. The caller divides by the number of tokens in the loss mask over all
ranks and micro-batches, so the gradient does not depend on how the batch is divided.
"""

import torch
from torch import Tensor

from areal_core.algorithm.segments import masked_segment_mean


def policy_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    level: str = "token",
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(sum of the loss over the loss mask, per-token statistics [tokens] without gradient).

    All inputs are [tokens], next-token aligned, packed by `cu_seqlens`. With
    `r = exp(logprobs - proximal_logprobs)`:

        L = max(-A r, -A clamp(r, 1 - eps_clip, 1 + eps_clip_higher))           PPO, arXiv 1707.06347 eq. 7
        L = min(L, -c_clip A)  where A < 0                                      dual clip, arXiv 1912.09729 eq. 5

    `eps_clip_higher` (default: `eps_clip`) is DAPO's clip-higher (arXiv 2503.14476 eq. 10). `level`
    "sequence" uses one ratio per sequence, `exp(mean(logprobs - proximal_logprobs))`, and its mean
    advantage (GSPO, arXiv 2507.18071 eq. 7). `weights` (`rejection.behaviour_weights`) multiply the
    loss; without them the tokens are treated as sampled by the proximal policy.

    Statistics: loss, importance_weight, approx_kl, clip_mask, dual_clip_mask.

    Raises:
        ValueError: `level` is neither "token" nor "sequence".
    """
    mask = loss_mask.bool()
    log_ratio = torch.where(mask, logprobs - proximal_logprobs, 0.0)
    if level == "sequence":
        log_ratio = masked_segment_mean(log_ratio, mask, cu_seqlens)
        advantages = masked_segment_mean(advantages, mask, cu_seqlens)
    elif level != "token":
        raise ValueError(f"importance sampling level {level!r} is unknown; expected token or sequence")
    ratio = log_ratio.exp()
    higher = eps_clip if eps_clip_higher is None else eps_clip_higher
    clipped_ratio = ratio.clamp(1.0 - eps_clip, 1.0 + higher)
    unclipped, clipped = -advantages * ratio, -advantages * clipped_ratio
    loss = torch.maximum(unclipped, clipped)
    clip_mask = mask & (unclipped < clipped)
    dual_clip_mask = torch.zeros_like(mask)
    if c_clip is not None:
        ceiling = c_clip * advantages.abs()  # the loss exceeds this only where A < 0
        dual_clip_mask = mask & (ceiling < loss)
        loss = torch.where(dual_clip_mask, ceiling, loss)
    if weights is not None:
        loss = loss * weights
    # where, not a product: a masked token may hold inf, and inf * 0 is nan.
    loss = torch.where(mask, loss, 0.0)
    stats = {
        "loss": loss.detach(),
        "importance_weight": torch.where(mask, ratio, 0.0).detach(),
        "approx_kl": torch.where(mask, log_ratio, 0.0).detach(),
        "clip_mask": clip_mask,
        "dual_clip_mask": dual_clip_mask,
    }
    return loss.sum(), stats
