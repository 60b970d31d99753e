"""The loss of supervised fine-tuning, on packed tokens."""

import torch
from torch import Tensor

from areal_core.algorithm.segments import segment_ids, segment_sum

Stats = dict[str, Tensor]


def sft_loss(logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Stats, Stats]:
    """(negative log-likelihood summed over the loss mask, {loss} [tokens], {ppl} [sequences]).

    Inputs are [tokens], next-token aligned, packed by `cu_seqlens`. `ppl` is the perplexity of a
    sequence's tokens in the loss mask; 1 where it has none.
    """
    mask = loss_mask.bool()
    loss = torch.where(mask, -logprobs, 0.0)
    ids, num_rows = segment_ids(cu_seqlens), cu_seqlens.numel() - 1
    total = segment_sum(loss.detach(), ids, num_rows)
    ppl = (total / segment_sum(mask.to(total.dtype), ids, num_rows).clamp(min=1)).exp()
    return loss.sum(), {"loss": loss.detach()}, {"ppl": ppl}
