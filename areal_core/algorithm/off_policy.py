"""Off-policy correction: weights and rejection of tokens that an older policy sampled.

Asynchronous training has three policies: behaviour (sampled the token, possibly some versions ago),
proximal (the trainer's weights at the start of the step) and current. Decoupled PPO (arXiv
2110.00641) clips current against proximal and multiplies by proximal / behaviour.

    behaviour_weights            bounds proximal / behaviour, per token or sequence
    loglinear_proximal_logprobs  proximal logprobs without a forward pass, by each token's staleness
    second_moment_mask           M2PO: drops the most off-policy tokens, to a second-moment budget
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_core.algorithm.advantages import kl_estimate
from areal_core.algorithm.alignment import masked_segment_max, masked_segment_mean, segment_ids, segment_sum
from areal_core.algorithm.normalization import SumOverRanks, on_one_rank

INFINITY_BITS = 0x7F800000  # of float32


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
    weight: str = "geometric-mean",
    upper: float | None = None,
    lower: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(mask, weights, filtered), each [tokens]: bool, float32, bool.

    All inputs are [tokens], packed by `cu_seqlens`. A token's weight is its ratio
    `proximal / behaviour`; the metric of it, or its divergence, is compared with the bounds.

    `level` "sequence" compares one number per sequence: the metrics of its tokens aggregated by
    `agg`, ratios as log-ratios. With the metric "ratio" its tokens also share one weight, whatever
    `agg` is: the geometric mean of their ratios, as upstream has it, or with `weight` "product" the
    ratio of the sequence's probabilities, which is the unbiased importance weight.

    `action` "mask" drops tokens that are out of bounds, "clamp" (ratio only) limits their weight.
    `filtered` marks the dropped or clamped tokens. Non-finite log-ratios count as 0, that is, as
    equal policies. Weights carry no gradient.

    Raises:
        ValueError: `metric` or `agg` is unknown.
    """
    mask = loss_mask.bool()
    log_ratio = (proximal_logprobs - behaviour_logprobs).detach().float()
    log_ratio = torch.where(log_ratio.isfinite() & mask, log_ratio, 0.0)
    if metric == "binary_kl":
        measured = torch.where(log_ratio != 0, binary_kl(proximal_logprobs, behaviour_logprobs), 0.0)
    else:
        measured = log_ratio if metric == "ratio" else kl_metric(log_ratio, metric)
    log_weight = log_ratio
    if level == "sequence":
        measured = aggregate(measured, mask, cu_seqlens, agg)
        if metric == "ratio":
            log_weight = aggregate(log_ratio, mask, cu_seqlens, "sum" if weight == "product" else "mean")
    measured = measured.exp() if metric == "ratio" else measured
    weights = log_weight.exp()
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
    if metric not in ("kl_k1", "kl_k2", "kl_k3"):
        raise ValueError(f"metric {metric!r} is unknown; expected ratio, kl_k1, kl_k2, kl_k3 or binary_kl")
    return kl_estimate(log_ratio, torch.zeros_like(log_ratio), metric.removeprefix("kl_"), clamp=torch.inf)


def binary_kl(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return the larger of KL(P, Q) and KL(Q, P), of the same shape, float32.

    P and Q are the two policies on "this token or any other", so that both KLs are sums of two
    terms. KPop's metric, as AReaL 2.0 has it. Probabilities within 1e-7 of 1 count as that far.
    """
    here, there = (given.detach().float().clamp(max=-1e-7) for given in (logprobs, other_logprobs))
    rest_here, rest_there = (-torch.expm1(given) for given in (here, there))  # of all other tokens
    difference, of_rest = here - there, rest_here.log() - rest_there.log()
    forward = here.exp() * difference + rest_here * of_rest
    return torch.maximum(forward, -there.exp() * difference - rest_there * of_rest)


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


def loglinear_share(versions: Tensor, current_version: int) -> Tensor:
    """Position of the proximal policy between behaviour (0) and current policy (1), float32.

    It has the shape of `versions`. The log-linear rule of A-3PO (arXiv 2512.06547): for a token
    sampled by version b, it is the point of version `current_version - 1` on the line from b to
    `current_version`. It is 0 for prompt tokens (version -1) and tokens that are not older than
    `current_version`.
    """
    staleness = current_version - versions
    share = ((staleness - 1) / staleness.clamp(min=1)).clamp(0.0, 1.0)
    return torch.where((versions >= 0) & (staleness > 0), share, 0.0)


def loglinear_proximal_logprobs(logprobs: Tensor, behaviour_logprobs: Tensor, share: Tensor) -> Tensor:
    """Approximate proximal logprobs without gradient at `share` (`loglinear_share`).

    All tensors have one shape.
    """
    return behaviour_logprobs + share * (logprobs.detach() - behaviour_logprobs)


def second_moment_mask(
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    loss_mask: Tensor,
    threshold: float,
    *,
    sum_over_ranks: SumOverRanks = on_one_rank,
) -> Tensor:
    """Return the mask of kept tokens, bool, a subset of `loss_mask`.

    All tensors have one shape.

    Second-Moment Trust Policy Optimization (arXiv 2510.01161): the largest squared log-ratios are
    dropped until the mean of the others is below `threshold`. The smallest is always kept; equal
    ones are kept or dropped together, so the result depends only on the set of tokens, not on how
    they are divided among ranks. A collective of four small sums.
    """
    mask = loss_mask.bool()
    squares = (proximal_logprobs - behaviour_logprobs).detach().float() ** 2
    squares = torch.where(squares.isfinite(), squares, torch.inf)
    # Non-negative floats are ordered as their bits are.
    bits = squares.contiguous().view(torch.int32)
    own = bits.masked_select(mask).sort().values  # [n]
    totals = F.pad(own.view(torch.float32).double().cumsum(0), (1, 0))  # [n + 1]

    def count_and_total(cutoffs: Tensor) -> Tensor:
        counts = torch.searchsorted(own, cutoffs.clamp(max=INFINITY_BITS).int(), right=True)
        return sum_over_ranks(torch.stack([counts.double(), totals[counts]]))  # [2, cutoffs]

    # `fitting`: the cutoffs below it have a mean that is small enough; it is non-decreasing. Its
    # digits are found one after the other, 2048 cutoffs at a time.
    fitting = torch.zeros(1, dtype=torch.int64, device=mask.device)
    for shift in (20, 10, 0):
        ends = fitting + (torch.arange(1, 2049, device=mask.device) << shift) - 1
        count, total = count_and_total(ends)
        fitting = fitting + (((count == 0) | (total / count < threshold)).sum() << shift)
    # Without any token up to the cutoff, it becomes the smallest token's own bits.
    cutoff = torch.where(count_and_total(fitting - 1)[0] == 0, fitting, fitting - 1)
    return mask & (bits <= cutoff.clamp(max=INFINITY_BITS).int())
