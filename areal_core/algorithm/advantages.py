"""From sequence rewards to token advantages: reward shaping, KL penalty, advantage estimation.

    task rewards [B] -- overlong_penalty, shape_rewards --> [B] -- normalization.py --> rewards [B]
    terminal_rewards [B, T] - kl_ctl * kl_estimate [B, T] -- gae --> advantages [B, T]

Steps of the policy are the tokens in the loss mask: prompt and tool tokens get no advantage.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_core.algorithm.alignment import first_and_last, masked
from areal_core.data.batch import FINISH_REASONS

CUT_OFF = FINISH_REASONS.index("length")
# Tokens of a block of `gae`, and of the window of blocks that fits into a processor's cache.
BLOCK, WINDOW = 32, 1536


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
    gae_lambda: float | Tensor = 1.0,
    mask_no_eos_with_zero: bool = False,
    turns: Tensor | None = None,
) -> Advantages:
    """Compute advantages from sequence rewards and an optional per-token KL penalty.

    `rewards` [B] are already shaped and normalised; `loss_mask`, `logprobs`, `reference_logprobs`
    and `values` [B, T] are next-token aligned (`alignment.to_next_token`); `finish_reason` [B] is 1
    where the completion was truncated. With `mask_no_eos_with_zero` such a row gets no reward, and
    its return is bootstrapped from the value after its last token. With both, truncation would be
    rewarded twice, and values would grow without bound where most rows are truncated.

    `gae_lambda` may be one per row, [B]. `turns` [B, T] integers makes a step of the recurrence of
    each turn (`gae_of_turns`); the KL penalty is then a token's own, in no other's advantage or
    return.
    """
    mask = loss_mask.bool()
    bootstraps = (finish_reason == CUT_OFF) & mask_no_eos_with_zero  # [B]
    task_rewards = total_rewards = terminal_rewards(torch.where(bootstraps, 0.0, rewards), mask)
    kl_rewards = torch.zeros_like(total_rewards)
    if reference_logprobs is not None:
        kl_rewards = masked(-kl_ctl * kl_estimate(logprobs, reference_logprobs, kl_estimator), mask)
        total_rewards = kl_rewards + total_rewards
    bootstrap = torch.zeros_like(rewards, dtype=torch.float32)
    if values is not None:
        end = attention_mask.sum(1, keepdim=True).sub(1).clamp(min=0)  # [B, 1]
        after_last = values.gather(1, end)[:, 0]
        bootstrap = torch.where(bootstraps, after_last, 0.0)
        values = masked(values.float(), mask)
    if turns is not None:
        learned, returns = gae_of_turns(task_rewards, values, mask, turns, bootstrap, discount, gae_lambda)
        return Advantages(learned + kl_rewards, returns, kl_rewards, total_rewards)
    advantages = gae(total_rewards, values, mask, bootstrap, discount, gae_lambda)
    returns = advantages if values is None else advantages + values
    return Advantages(advantages, returns, kl_rewards, total_rewards)


def terminal_rewards(rewards: Tensor, loss_mask: Tensor) -> Tensor:
    """Put each reward on the last token in the loss mask of its row: [B] -> [B, T].

    Not on the last token: when a sequence ends in tool output, whose mask is 0, the reward would be
    lost there. The reward of a row with an empty loss mask is dropped.
    """
    mask = loss_mask.bool()
    last = first_and_last(mask)[1][:, None]  # [B, 1]
    earned = torch.where(mask.gather(1, last), rewards[:, None].float(), 0.0)  # [B, 1]
    return torch.zeros(mask.shape, device=mask.device).scatter_(1, last, earned)


def runs_of(mask: Tensor) -> Tensor:
    """Number the runs of true elements of each row from 1, 0 elsewhere: [B, T] bool -> int64."""
    starts = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return starts.cumsum(1) * mask


def gae_of_turns(
    rewards: Tensor,
    values: Tensor | None,
    loss_mask: Tensor,
    turns: Tensor,
    bootstrap: Tensor,
    discount: float,
    gae_lambda: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """`gae` with one step for each turn: advantages and returns, [B, T], equal within a turn.

    `turns` [B, T] integers are 1 or more in the loss mask and rise from turn to turn. The reward of
    a turn is the sum over its tokens in the mask, its value that of the first of them.
    """
    mask = loss_mask.bool()
    place = (turns * mask).long()  # [B, T]; 0 outside of the mask
    slots = (len(place), int(place.max()) + 1)
    is_turn = torch.zeros(slots, dtype=torch.bool, device=mask.device).scatter_(1, place, mask)
    is_turn[:, 0] = False
    summed = torch.zeros(slots, device=mask.device).scatter_add_(1, place, masked(rewards, mask))
    states = torch.zeros_like(summed)
    if values is not None:
        columns = torch.arange(mask.shape[1], device=mask.device).expand_as(place)
        first = torch.full(slots, mask.shape[1] - 1, device=mask.device)
        states = values.gather(1, first.scatter_reduce_(1, place, columns, "amin"))
    learned = gae(summed, states, is_turn, bootstrap, discount, gae_lambda)
    returns = learned if values is None else learned + states
    return masked(learned.gather(1, place), mask), masked(returns.gather(1, place), mask)


def gae(
    rewards: Tensor,
    values: Tensor | None,
    loss_mask: Tensor,
    bootstrap: Tensor,
    discount: float,
    gae_lambda: float | Tensor,
) -> Tensor:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 11-16) over the loss mask.

    Returns [B, T] float32.

    `delta_t = r_t + discount * V_next - V_t`, `A_t = delta_t + discount * gae_lambda * A_next`,
    where "next" is the next position whose mask is 1: prompt and tool tokens in between are not
    steps of the policy. Rewards and values are finite; `values` None are 0. `bootstrap` [B] is the
    value after the last one. With discount = gae_lambda = 1 and no values, the advantage of a token
    is the sum of the rewards from it on.

    Computed as the linear recurrence `m_t = own_t + decay_t * m_{t+1}` of what position t passes on
    to the one before it:

        own_t = discount * (1 - gae_lambda) * V_t + discount * gae_lambda * r_t      0 in a hole
        decay_t = discount * gae_lambda                                              1 in a hole
        A_t = r_t - V_t + m_{t+1},    m behind the last position = discount * bootstrap

    A position depends on the ones behind it in the same way whatever the padding and the other
    rows: the same bits. `gae_lambda` may be one per row, [B].
    """
    mask, num_tokens = loss_mask.bool(), loss_mask.shape[1]
    if isinstance(gae_lambda, Tensor):
        gae_lambda = gae_lambda.float()[:, None]
    message = discount * bootstrap.float()  # [B]
    advantages = torch.empty(mask.shape, device=mask.device)
    for start in range((num_tokens - 1) // WINDOW * WINDOW, -1, -WINDOW):
        part = slice(start, start + WINDOW)
        ahead = rewards[:, part].float()  # [B, w]
        keep = mask[:, part].view(torch.uint8).float()  # [B, w]
        own = discount * gae_lambda * ahead
        if values is not None:
            own += discount * (1 - gae_lambda) * values[:, part]
            ahead = ahead - values[:, part]
        decay = (1 - keep).add_(keep * (discount * gae_lambda))
        messages = scan_from_end(own.mul_(keep), decay, message)  # [w, B]
        following = torch.cat([messages[1:], message[None]]).t().contiguous()  # [B, w]
        advantages[:, part] = following.add_(ahead).mul_(keep)
        message = messages[0]
    return advantages


def scan_from_end(own: Tensor, decay: Tensor, message: Tensor) -> Tensor:
    """Return `m_t = own_t + decay_t * m_{t+1}` of [B, w] columns, transposed: [w, B].

    `message` [B] is m behind the last column. All blocks of columns advance together, one column
    at a time, as if nothing came after them; then what comes after is passed from block to block.
    """
    num_columns = own.shape[1]
    local = in_blocks(own, 0.0)  # [blocks, BLOCK, B]
    factor = in_blocks(decay, 1.0)  # on what comes from behind the block
    locals_, factors = local.unbind(1), factor.unbind(1)  # [blocks, B] of each column
    for column in range(BLOCK - 2, -1, -1):
        locals_[column].add_(factors[column] * locals_[column + 1])
        factors[column].mul_(factors[column + 1])
    incoming = torch.empty_like(locals_[0])  # [blocks, B]
    for block in range(len(incoming) - 1, -1, -1):
        incoming[block] = message
        message = locals_[0][block] + factors[0][block] * message
    return local.add_(factor.mul_(incoming[:, None])).view(-1, own.shape[0])[:num_columns]


def in_blocks(columns: Tensor, fill: float) -> Tensor:
    """Transpose and divide [B, w] columns, the last block padded: [blocks, BLOCK, B]."""
    padded = torch.nn.functional.pad(columns, (0, -columns.shape[1] % BLOCK), value=fill)
    return padded.t().contiguous().view(-1, BLOCK, columns.shape[0])
