"""M2PO: drop the most off-policy tokens until the rest is within a second-moment budget."""

import torch
from torch import Tensor

from areal_core.algorithm.normalization import SumOverRanks, on_one_rank

INFINITY_BITS = 0x7F800000  # of float32


def second_moment_mask(
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    loss_mask: Tensor,
    threshold: float,
    *,
    sum_over_ranks: SumOverRanks = on_one_rank,
) -> Tensor:
    """Return the mask of kept tokens, bool, a subset of `loss_mask`.

    All tensors have one shape and are on the CPU.

    Second-Moment Trust Policy Optimization (arXiv 2510.01161): the largest squared log-ratios are
    dropped until the mean of the others is below `threshold`. The smallest is always kept; equal
    ones are kept or dropped together, so the result depends only on the set of tokens, not on how
    they are divided among ranks. A collective of about 33 small sums.
    """
    mask = loss_mask.bool()
    squares = (proximal_logprobs - behaviour_logprobs).detach().float() ** 2
    squares = torch.where(squares.isfinite(), squares, torch.inf)
    # Non-negative floats are ordered as their bits are, so a cutoff is found by bisection over
    # integers.
    bits = squares.contiguous().view(torch.int32)
    own_bits = bits[mask].sort().values  # [n]
    totals = own_bits.view(torch.float32).double().cumsum(0)  # [n]

    def count_and_mean(cutoff: int) -> tuple[float, float]:
        own_count = int(torch.searchsorted(own_bits, cutoff, right=True))
        own_total = float(totals[own_count - 1]) if own_count else 0.0
        count, total = sum_over_ranks(torch.tensor([own_count, own_total], dtype=torch.float64)).tolist()
        return count, total / max(count, 1.0)

    low, high = -1, INFINITY_BITS  # the mean up to `low` is small enough; it is non-decreasing in the cutoff
    while low < high:
        middle = (low + high + 1) // 2
        count, mean = count_and_mean(middle)
        if count == 0 or mean < threshold:
            low = middle
        else:
            high = middle - 1
    if count_and_mean(low)[0] == 0:
        low += 1  # the smallest token's own bits
    return mask & (bits <= low)
