"""From sequence rewards to token advantages: reward shaping, KL penalty, advantage estimation.

    task rewards [B] -- overlong_penalty, shape_rewards --> [B] -- normalization.py --> rewards [B]
    terminal_rewards [B, T] - kl_ctl * kl_estimate [B, T] -- gae --> advantages [B, T]

Steps of the policy are the tokens in the loss mask: prompt and tool tokens get no advantage.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_core.batch import FINISH_REASONS

CUT_OFF = FINISH_REASONS.index("length")


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


def kl_estimate(
    logprobs: Tensor, reference_logprobs: Tensor, estimator: str = "k1", clamp: float = 10.0
) -> Tensor:
    """Per-token estimate, in the shape of `logprobs`, clamped to `[-clamp, clamp]`.

    With `d = log pi - log pi_ref`: k1 = d, unbiased but noisy; k2 = d^2 / 2, biased, its gradient
    is the KL's; k3 = exp(-d) - 1 + d, unbiased and never negative (J. Schulman, "Approximating KL
    divergence", 2020).

    Raises:
        ValueError: the estimator is none of these.
    """
    difference = logprobs - reference_logprobs
    if estimator == "k1":
        estimate = difference
    elif estimator == "k2":
        estimate = difference**2 / 2
    elif estimator == "k3":
        estimate = torch.exp(-difference) - 1 + difference
    else:
        raise ValueError(f"KL estimator {estimator!r} is unknown; expected k1, k2 or k3")
    return estimate.clamp(min=-clamp, max=clamp)


@dataclass
class Advantages:
    """All [B, T] float32, next-token aligned, 0 where the loss mask is 0."""

    advantages: Tensor
    returns: Tensor
    kl_rewards: Tensor
    total_rewards: Tensor


def compute_advantages(
    rewards: Tensor,
    loss_mask: Tensor,
    logprobs: Tensor,
    attention_mask: Tensor,
    finish_reason: Tensor,
    *,
    reference_logprobs: Tensor | None = None,
    values: Tensor | None = None,
    kl_ctl: float = 0.0,
    kl_estimator: str = "k1",
    discount: float = 1.0,
    gae_lambda: float = 1.0,
    mask_no_eos_with_zero: bool = False,
) -> Advantages:
    """Compute advantages from sequence rewards and an optional per-token KL penalty.

    `rewards` [B] are already shaped and normalised; `loss_mask`, `logprobs`, `reference_logprobs`
    and `values` [B, T] are next-token aligned (`alignment.to_next_token`); `finish_reason` [B] is 1
    where the completion was truncated. With `mask_no_eos_with_zero` such a row gets no reward, and
    its return is bootstrapped from the value after its last token. With both, truncation would be
    rewarded twice, and values would grow without bound where most rows are truncated.
    """
    mask = loss_mask.bool()
    bootstraps = (finish_reason == CUT_OFF) & mask_no_eos_with_zero  # [B]
    rewards = torch.where(bootstraps, 0.0, rewards)
    kl_rewards = torch.zeros_like(logprobs)
    if reference_logprobs is not None:
        kl_rewards = torch.where(mask, -kl_ctl * kl_estimate(logprobs, reference_logprobs, kl_estimator), 0.0)
    total_rewards = kl_rewards + terminal_rewards(rewards, mask)
    values = torch.zeros_like(logprobs) if values is None else values
    after_last = values.gather(1, attention_mask.sum(1, keepdim=True).long().sub(1).clamp(min=0))[:, 0]  # [B]
    bootstrap = torch.where(bootstraps, after_last, 0.0)
    advantages = gae(total_rewards, values, mask, bootstrap, discount, gae_lambda)
    return Advantages(advantages, torch.where(mask, advantages + values, 0.0), kl_rewards, total_rewards)


def terminal_rewards(rewards: Tensor, loss_mask: Tensor) -> Tensor:
    """Put each reward on the last token in the loss mask of its row: [B] -> [B, T].

    Not on the last token: when a sequence ends in tool output, whose mask is 0, the reward would be
    lost there. The reward of a row with an empty loss mask is dropped.
    """
    num_tokens = loss_mask.shape[1]
    positions = torch.arange(1, num_tokens + 1, device=loss_mask.device)  # [T], from 1 so that 0 means none
    last = (loss_mask.bool() * positions).amax(1)  # [B]
    return torch.where(positions == last[:, None], rewards[:, None].float(), 0.0)


def gae(
    rewards: Tensor, values: Tensor, loss_mask: Tensor, bootstrap: Tensor, discount: float, gae_lambda: float
) -> Tensor:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 11-16) over the loss mask.

    Returns [B, T] float32.

    `delta_t = r_t + discount * V_next - V_t`, `A_t = delta_t + discount * gae_lambda * A_next`,
    where "next" is the next position whose mask is 1: prompt and tool tokens in between are not
    steps of the policy. `bootstrap` [B] is the value after the last one. With discount = gae_lambda
    = 1 and no values, the advantage of a token is the sum of the rewards from it on.
    """
    mask = loss_mask.bool()
    advantages = torch.zeros_like(rewards, dtype=torch.float32)
    next_value, next_advantage = bootstrap.float(), torch.zeros_like(bootstrap, dtype=torch.float32)  # [B]
    for t in range(rewards.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + discount * next_value - values[:, t]
        advantage = delta + discount * gae_lambda * next_advantage
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
    return advantages
