"""Off-policy correction: importance weights of tokens, and rejection of tokens out of bounds.

Asynchronous training has three policies: behaviour (sampled the token, possibly some versions ago),
proximal (the trainer's weights at the start of the step) and current. Decoupled PPO (arXiv
2110.00641) clips current against proximal and multiplies by proximal / behaviour; this module
bounds the latter ratio.
"""

import torch
from torch import Tensor

from areal_core.algorithm.segments import masked_segment_max, masked_segment_mean, segment_ids, segment_sum


def behaviour_weights(
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    level: str = "token",
    action: str = "mask",
    metric: str = "ratio",
    agg: str = "mean",
    upper: float | None = None,
    lower: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(mask, weights, filtered), each [tokens]: bool, float32, bool.

    All inputs are [tokens], packed by `cu_seqlens`. Without bounds every token keeps its ratio.
    `level` "sequence" aggregates the tokens of a sequence by `agg`; a ratio is aggregated as
    log-ratio (the mean gives the geometric mean). `action` "mask" drops tokens that are out of
    bounds, "clamp" (ratio only) limits their weight. `filtered` marks the dropped or clamped
    tokens. Non-finite log-ratios count as 0, that is, as equal policies. Weights carry no gradient.

    Raises:
        ValueError: `metric` or `agg` is unknown.
    """
    mask = loss_mask.bool()
    log_ratio = (proximal_logprobs - behaviour_logprobs).detach().float()
    log_ratio = torch.where(log_ratio.isfinite() & mask, log_ratio, 0.0)
    if metric == "ratio":
        aggregated = log_ratio if level == "token" else aggregate(log_ratio, mask, cu_seqlens, agg)
        measured = weights = aggregated.exp()
    else:
        per_token = kl_metric(log_ratio, metric)
        measured = per_token if level == "token" else aggregate(per_token, mask, cu_seqlens, agg)
        weights = log_ratio.exp()
    outside = torch.zeros_like(mask)
    if upper is not None:
        outside = outside | (measured > upper)
    if lower is not None:
        outside = outside | (measured < lower)
    if action == "clamp":
        weights = torch.where(outside, weights.clamp(min=lower or 0.0, max=upper), weights)
        kept = mask
    else:
        kept = mask & ~outside
    return kept, torch.where(kept, weights, 0.0), mask & outside


def kl_metric(log_ratio: Tensor, metric: str) -> Tensor:
    """Return k1, k2 or k3 of `kl.kl_estimate` without its clamp, which would distort a bound."""
    if metric == "kl_k1":
        return log_ratio
    if metric == "kl_k2":
        return log_ratio**2 / 2
    if metric == "kl_k3":
        return torch.exp(-log_ratio) - 1 + log_ratio
    raise ValueError(f"metric {metric!r} is unknown; expected ratio, kl_k1, kl_k2 or kl_k3")


def aggregate(values: Tensor, mask: Tensor, cu_seqlens: Tensor, agg: str) -> Tensor:
    """Aggregate the masked tokens of each sequence to one number, repeated to [tokens]."""
    if agg == "mean":
        return masked_segment_mean(values, mask, cu_seqlens)
    if agg == "max":
        return masked_segment_max(values, mask, cu_seqlens)
    if agg == "sum":
        ids = segment_ids(cu_seqlens)
        return segment_sum(torch.where(mask, values, 0.0), ids, cu_seqlens.numel() - 1)[ids]
    raise ValueError(f"aggregation {agg!r} is unknown; expected mean, sum or max")
