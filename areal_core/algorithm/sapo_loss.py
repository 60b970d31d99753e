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
    """(sum over the loss mask, per-token statistics); all inputs [tokens].

    Soft Adaptive Policy Optimization (arXiv 2511.20347): `-A * sigmoid(tau (r - 1)) * 4 / tau`, tau
    by the sign of A. At r = 1 the gradient is that of `-A r`; away from 1 it decays, faster for
    negative advantages.

    Statistics: loss, importance_weight, approx_kl, sapo_soft_gate (with its factor 4 / tau), and
    the gates for positive and for negative advantages.
    """
    mask = loss_mask.bool()
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    gate_pos, gate_neg = (torch.sigmoid(tau * (ratio - 1)) * 4 / tau for tau in (tau_pos, tau_neg))
    gate = torch.where(advantages > 0, gate_pos, gate_neg)
    loss = torch.where(mask, -gate * advantages, 0.0)
    stats = {
        "loss": loss.detach(),
        "importance_weight": ratio.detach(),
        "approx_kl": log_ratio.detach(),
        "sapo_soft_gate": gate.detach(),
        "sapo_scaled_gate_pos": gate_pos.detach(),
        "sapo_scaled_gate_neg": gate_neg.detach(),
    }
    return loss.sum(), stats
