"""Alignment of a batch to the next token, and reductions over the sequences of a packed batch.

`to_next_token` is the only place that aligns: position t then refers to token t + 1. A packed batch
is flat, `[tokens]`; `cu_seqlens` [n + 1] int32 has the start of each sequence, and the number of
tokens as its last element.
"""

import torch
from torch import Tensor

ROLLED = ("loss_mask", "logprobs", "versions")
LAST = {"loss_mask": 0, "logprobs": 0, "versions": -1}


def to_next_token(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch with `loss_mask`, `logprobs` and `versions` [B, T] shifted left by one.

    The other tensors are shared. The last column has no next token: mask 0, logprob 0, version -1.
    The three must be shifted together: a version that is not shifted with its mask puts every
    staleness statistic off by one token.
    """
    return batch | {key: shifted_left(batch[key], LAST[key]) for key in ROLLED}


def masked(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """Return floating-point `values` where `mask`, else exactly `fill`, whatever is there.

    On bits: on a CPU several times as fast as `torch.where`, which is not vectorised for a mask.
    """
    integer = {torch.float32: torch.int32, torch.float64: torch.int64}[values.dtype]
    other = torch.full((), fill, dtype=values.dtype, device=values.device).view(integer)
    chosen = mask.to(integer).neg_()  # all bits set where the mask is
    return (values.view(integer) ^ other).bitwise_and_(chosen).bitwise_xor_(other).view(values.dtype)


def first_and_last(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of the first and last true element of each row of [B, T]: two int64 [B].

    Without one, the first is 0 and the last T - 1.
    """
    return mask.max(1).indices, mask.shape[1] - 1 - mask.flip(1).max(1).indices


def shifted_left(values: Tensor, last: float) -> Tensor:
    """Shift columns of [B, T] left by one: column t is column t + 1, the last column is `last`."""
    end = torch.full_like(values[:, :1], last)  # [B, 1]
    return torch.cat([values[:, 1:], end], dim=1)


def segment_ids(cu_seqlens: Tensor) -> Tensor:
    """Index of each token's sequence: [n + 1] -> [tokens] int64."""
    lengths = cu_seqlens.diff().long()
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)


def segment_sum(values: Tensor, ids: Tensor, num_segments: int) -> Tensor:
    """Sum of `values` [tokens] over each segment: [num_segments]."""
    return values.new_zeros(num_segments).index_add(0, ids, values)


def masked_segment_mean(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mean of `values` over the masked tokens of each token's sequence, or 0: [tokens]."""
    ids, num_segments = segment_ids(cu_seqlens), cu_seqlens.numel() - 1
    total = segment_sum(torch.where(mask, values, 0.0), ids, num_segments)  # [n]
    count = segment_sum(mask.to(values.dtype), ids, num_segments)  # [n]
    return (total / count.clamp(min=1))[ids]


def masked_segment_max(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Maximum of `values` over the masked tokens of each token's sequence, or 0: [tokens]."""
    ids, num_segments = segment_ids(cu_seqlens), cu_seqlens.numel() - 1
    masked = torch.where(mask, values, -torch.inf)
    largest = masked.new_full((num_segments,), -torch.inf).scatter_reduce(
        0, ids, masked, reduce="amax"
    )  # [n]
    return torch.where(largest.isfinite(), largest, 0.0)[ids]
