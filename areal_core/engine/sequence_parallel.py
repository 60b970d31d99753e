"""Ulysses sequence parallelism (arXiv 2309.14509): ranks share tokens, and heads in attention.

```
rank 0   tokens 0..n/2, all heads ──┐ exchange ┌── all tokens, heads 0..h/2 ── attention ──┐ exchange ┌── tokens 0..n/2, all heads
rank 1   tokens n/2..n, all heads ──┘          └── all tokens, heads h/2..h ── attention ──┘          └── tokens n/2..n, all heads
```

Everything else in a transformer acts on each token separately. The model's output for the tokens is
gathered before the loss, which has complete rows on every rank and computes the same value there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig

from areal_core.engine.ranks import Ranks
from areal_core.errors import RanksError

Group = dist.ProcessGroup
# Products of fewer rows add in another order on a CPU: see `attention.py`.
MIN_ROWS = 16


@dataclass(frozen=True)
class TokenSlice:
    """This rank's slice of the packed tokens of `group`: `size` tokens from `start`.

    The slices cover `num_tokens` tokens and `padding` after them. Without a group the slice is all
    tokens.
    """

    start: int
    size: int
    num_tokens: int
    padding: int
    group: Group | None

    def of(self, tokens: Tensor) -> Tensor:
        """Return this rank's slice of a tensor [tokens, ...]; 0 on padding."""
        padded = pad(tokens, (0, 0) * (tokens.dim() - 1) + (0, self.padding))
        return padded[self.start : self.start + self.size]

    def lengths(self, lengths: list[int]) -> list[int]:
        """Return the lengths with the padding as a separate sequence: no token attends to it."""
        return [*lengths, self.padding] if self.padding else lengths

    def gather(self, columns: Tensor) -> Tensor:
        """Gather every rank's [size, columns] to [tokens, columns]; a differentiable collective."""
        if self.group is None:
            return columns[: self.num_tokens]
        return GatherTokens.apply(columns, self)[: self.num_tokens]


def slice_tokens(num_tokens: int, ranks: Ranks) -> TokenSlice:
    """Return this rank's slice of the `num_tokens` packed tokens of its group.

    It has at least `MIN_ROWS` tokens.
    """
    num_slices = ranks.sequence_parallel_size
    padding = max(-num_tokens % num_slices, MIN_ROWS * num_slices - num_tokens)
    size = (num_tokens + padding) // num_slices
    start = ranks.sequence_parallel_rank * size
    return TokenSlice(start, size, num_tokens, padding, ranks.sequence_parallel_group)


class GatherTokens(torch.autograd.Function):
    """Concatenate the ranks' slices.

    Every rank computes the same loss of all tokens, so the gradient of its own slice is complete:
    backward needs no reduction.
    """

    @staticmethod
    def forward(ctx: Any, columns: Tensor, tokens: TokenSlice) -> Tensor:
        ctx.tokens = tokens
        slices = [torch.empty_like(columns) for _ in range(dist.get_world_size(tokens.group))]
        dist.all_gather(slices, columns.contiguous(), group=tokens.group)
        return torch.cat(slices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        tokens = ctx.tokens
        return gradient[tokens.start : tokens.start + tokens.size], None


class Exchange(torch.autograd.Function):
    """All-to-all: rank i receives element i of each rank's tensor [ranks, ...].

    The result is stacked in rank order. The gradients return by the same exchange.
    """

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Group) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Exchange.apply(gradient, ctx.group), None


def exchange_heads(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Group,
) -> Tensor:
    """Compute attention over all tokens of the group for this rank's share of heads; a collective.

    Args:
        attend: query, key, value [1, heads of the rank, all tokens, head_dim]
            -> [1, all tokens, heads of the rank, head_dim].
        query: [1, heads, tokens of the rank, head_dim]. key, value: the same with kv_heads, which
            are repeated if there are more ranks.

    Returns:
        [1, tokens of the rank, heads, head_dim].
    """
    size = group.size()
    _, kv_heads, num_tokens, head_dim = key.shape
    repeats = lcm(kv_heads, size) // kv_heads
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    parts = [tensor.reshape(size, -1, num_tokens, head_dim) for tensor in (query, key, value)]
    heads = [part.shape[1] for part in parts]  # of each rank
    received = Exchange.apply(torch.cat(parts, dim=1), group)  # [ranks, heads, rank tokens, head_dim]
    all_tokens = received.transpose(0, 1).reshape(1, sum(heads), size * num_tokens, head_dim)
    attended = attend(*all_tokens.split(heads, dim=1))  # [1, all tokens, heads of the rank, head_dim]
    back = Exchange.apply(attended.reshape(size, num_tokens, heads[0], head_dim), group)
    return back.transpose(0, 1).reshape(1, num_tokens, size * heads[0], head_dim)


def check_heads(config: PretrainedConfig, sequence_parallel: int, tensor_parallel: int) -> None:
    """Raise RanksError if the heads do not divide among the ranks that have the same rows."""
    if sequence_parallel * tensor_parallel == 1:
        return  # also for a model without attention
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    if heads is None:
        raise RanksError(
            f"a {config.model_type!r} model has no attention heads, which c{sequence_parallel} x t{tensor_parallel} "
            f"ranks would share: leave c and t out of allocation_mode"
        )
    if heads % (sequence_parallel * tensor_parallel):
        raise RanksError(
            f"the model has {heads} attention heads, which c{sequence_parallel} x t{tensor_parallel} ranks "
            f"cannot share: use sizes in allocation_mode whose product divides {heads}"
        )
