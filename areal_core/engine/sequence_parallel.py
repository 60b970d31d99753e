"""Ulysses sequence parallelism (arXiv 2309.14509): ranks that hold the same rows share the tokens, and in attention the heads.

```
rank 0   tokens 0..n/2, all heads ──┐ exchange ┌── all tokens, heads 0..h/2 ── attention ──┐ exchange ┌── tokens 0..n/2, all heads
rank 1   tokens n/2..n, all heads ──┘          └── all tokens, heads h/2..h ── attention ──┘          └── tokens n/2..n, all heads
```

All else in a transformer acts on each token alone. What the model gives for the tokens is gathered before a loss sees it: a loss has whole
rows on every rank, and computes the same number there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig

from areal_core.engine.errors import RanksError
from areal_core.engine.ranks import Ranks

Group = dist.ProcessGroup


@dataclass(frozen=True)
class TokenSlice:
    """The `size` packed tokens from `start` that this rank of `group` has, of `num_tokens` and `padding` after them.

    Without a group they are all tokens, and there is no padding.
    """

    start: int
    size: int
    num_tokens: int
    padding: int
    group: Group | None

    def of(self, tokens: Tensor) -> Tensor:
        """This rank's part of a tensor [tokens]; 0 on padding."""
        return pad(tokens, (0, self.padding))[self.start : self.start + self.size]

    def lengths(self, lengths: list[int]) -> list[int]:
        """Tokens of each sequence, of all ranks; the padding is a sequence of its own, so that no token looks at it."""
        return [*lengths, self.padding] if self.padding else lengths

    def gather(self, columns: Tensor) -> Tensor:
        """[size, columns] of every rank -> [tokens, columns] on every rank; a collective, and differentiable."""
        if self.group is None:
            return columns
        return GatherTokens.apply(columns, self)[: self.num_tokens]


def slice_tokens(num_tokens: int, ranks: Ranks) -> TokenSlice:
    """This rank's slice of so many packed tokens of its group."""
    num_slices = ranks.sequence_parallel_size
    padding = -num_tokens % num_slices
    size = (num_tokens + padding) // num_slices
    start = ranks.sequence_parallel_rank * size
    return TokenSlice(start, size, num_tokens, padding, ranks.sequence_parallel_group)


class GatherTokens(torch.autograd.Function):
    """What each rank has of its slice, one after another.

    Every rank computes the same loss of the whole, so the gradient of its own slice is complete: nothing is summed on the way back.
    """

    @staticmethod
    def forward(ctx, columns: Tensor, tokens: TokenSlice) -> Tensor:
        ctx.tokens = tokens
        slices = [torch.empty_like(columns) for _ in range(dist.get_world_size(tokens.group))]
        dist.all_gather(slices, columns.contiguous(), group=tokens.group)
        return torch.cat(slices)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        tokens = ctx.tokens
        return gradient[tokens.start : tokens.start + tokens.size], None


class Exchange(torch.autograd.Function):
    """Part i of each rank's tensor [ranks, ...] goes to rank i, which stacks what it gets in rank order; gradients go back likewise."""

    @staticmethod
    def forward(ctx, parts: Tensor, group: Group) -> Tensor:
        ctx.group = group
        got = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(got, parts.contiguous(), group=group)
        return got

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return Exchange.apply(gradient, ctx.group), None


def exchange_heads(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Group,
) -> Tensor:
    """Attention over all tokens of the group, by each rank for its part of the heads; a collective.

    Args:
        attend: query, key, value [1, heads of the rank, all tokens, head_dim] -> [1, all tokens, heads of the rank, head_dim].
        query: [1, heads, tokens of the rank, head_dim]. key, value: the same with kv_heads, each repeated where ranks are more.

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
    got = Exchange.apply(torch.cat(parts, dim=1), group)  # [ranks, heads, tokens of the rank, head_dim]
    whole = got.transpose(0, 1).reshape(1, sum(heads), size * num_tokens, head_dim)
    attended = attend(*whole.split(heads, dim=1))  # [1, all tokens, heads of the rank, head_dim]
    back = Exchange.apply(attended.reshape(size, num_tokens, heads[0], head_dim), group)
    return back.transpose(0, 1).reshape(1, num_tokens, size * heads[0], head_dim)


def check_heads(config: PretrainedConfig, sequence_parallel: int, tensor_parallel: int) -> None:
    """Raise RanksError when the model's attention heads do not divide among the ranks that hold the same rows."""
    heads = config.get_text_config().num_attention_heads
    if heads % (sequence_parallel * tensor_parallel):
        raise RanksError(
            f"the model has {heads} attention heads, which c{sequence_parallel} x t{tensor_parallel} ranks cannot share: "
            f"take sizes in allocation_mode whose product divides {heads}"
        )
