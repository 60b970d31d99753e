"""M2PO: drop just so many of the most off-policy tokens that the rest stays within a second-moment budget."""

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
    """The tokens that are kept: bool, a subset of `loss_mask`; all tensors have one shape, on the CPU.

    Second-Moment Trust Policy Optimization (arXiv 2510.01161): of the squared log-ratios the largest are dropped until
    the mean of the others is below `threshold`. The smallest stays in any case; equal ones stay or go together, so the
    result depends on the set of tokens only, not on the ranks that hold them. A collective of about 33 small sums.
    """
    mask = loss_mask.bool()
    squares = (proximal_logprobs - behaviour_logprobs).detach().float() ** 2
    squares = torch.where(squares.isfinite(), squares, torch.inf)
    # Floats that are not negative have the order of their bits, so a cutoff between them is found by halving integers.
    bits = squares.contiguous().view(torch.int32)
    own_bits = bits[mask].sort().values  # [n]
    totals = own_bits.view(torch.float32).double().cumsum(0)  # [n]

    def count_and_mean(cutoff: int) -> tuple[float, float]:
        own_count = int(torch.searchsorted(own_bits, cutoff, right=True))
        own_total = float(totals[own_count - 1]) if own_count else 0.0
        count, total = sum_over_ranks(torch.tensor([own_count, own_total], dtype=torch.float64)).tolist()
        return count, total / max(count, 1.0)

    low, high = -1, INFINITY_BITS  # the mean up to `low` is small enough; it never falls as the cutoff rises
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
