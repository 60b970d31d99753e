"""Rank 1 has a much bigger batch and still computes; its peers wait for it. Slow, not hung.

label: straggler_or_not_hung
culprits: 1
ranks: 2
computes: yes
"""

import torch
import torch.distributed as dist
from hang_point import meet


def attention(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ x.T, dim=-1) @ x


def mlp(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ x.T) @ x / x.norm()


def forward(num_microbatches: int) -> torch.Tensor:
    x = torch.ones(96, 96)
    for _ in range(num_microbatches):
        x = mlp(attention(x))
    return x.sum()


meet()
loss = forward(num_microbatches=10**9 if dist.get_rank() == 1 else 1)
dist.all_reduce(loss)
