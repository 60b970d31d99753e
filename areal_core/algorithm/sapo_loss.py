"""SAPO: a soft gate on the policy ratio in place of a clip, on packed tokens."""

import torch
from torch import Tensor


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(sum over trainable tokens, per-token statistics); all inputs [tokens].

    Soft Adaptive Policy Optimization (arXiv 2511.20347): `-A * sigmoid(tau (r - 1)) * 4 / tau`, tau by the sign of A. At
    r = 1 the gradient is that of `-A r`; away from 1 it fades, faster for negative advantages.

    Statistics: loss, importance_weight, approx_kl, soft_gate (with its factor 4 / tau).
    """
    mask = loss_mask.bool()
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    loss = torch.where(mask, -gate * advantages, 0.0)
    stats = {
        "loss": loss.detach(),
        "importance_weight": ratio.detach(),
        "approx_kl": log_ratio.detach(),
        "soft_gate": gate.detach(),
    }
    return loss.sum(), stats
