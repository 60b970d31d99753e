"""Reward shaping, from a task's reward to the training reward: penalty, bias, scale, clip."""

import torch
from torch import Tensor


def overlong_penalty(
    completion_lengths: Tensor, max_new_tokens: int, overlong_tokens: int, factor: float
) -> Tensor:
    """Soft overlong punishment [B], 0 or negative.

    `completion_lengths` [B] are in tokens. DAPO (arXiv 2503.14476) eq. 13: 0 up to `max_new_tokens
    - overlong_tokens`, then decreasing linearly to `-factor` at `max_new_tokens`.
    """
    exceed = completion_lengths - (max_new_tokens - overlong_tokens)
    return torch.clamp(-exceed / overlong_tokens * factor, max=0.0).float()


def shape_rewards(rewards: Tensor, *, bias: float = 0.0, scaling: float = 1.0, clip: float = 20.0) -> Tensor:
    """`(rewards + bias) * scaling`, clipped to `[-clip, clip]`; [B] float32."""
    return torch.clamp((rewards.float() + bias) * scaling, min=-clip, max=clip)


def groups_without_spread(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(all its rewards are equal, it has several samples) of each group: two bool [groups].

    Both inputs are [B]. Where rewards are compared within groups, a group of several samples with
    equal rewards has no training signal.
    """
    groups, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)[1:]
    values = rewards.float()
    lowest = values.new_full(counts.shape, torch.inf).scatter_reduce(0, groups, values, "amin")
    highest = values.new_full(counts.shape, -torch.inf).scatter_reduce(0, groups, values, "amax")
    return lowest == highest, counts > 1
