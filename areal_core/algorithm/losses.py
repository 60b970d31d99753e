"""The losses of every method, on packed tokens, and statistics without gradient.

    policy          policy_loss (PPO, GRPO, GSPO, DAPO's clip-higher, dual clip), cispo_loss,
                    sapo_loss, kl_loss, entropy_bonus, distillation_loss: a loss per token, 0
                    outside of the loss mask; aggregate_loss and loss_denominator make one number
    critic          value_loss, explained_variance
    supervised      sft_loss
    preferences     dpo_loss, reward_model_loss: chosen and rejected sequences alternate

The losses of critics, supervised learning and preferences are sums over the tokens in the loss
mask, or over pairs. The caller divides every sum by a denominator over all ranks and micro-batches,
so the gradient does not depend on how the batch is divided.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_core.algorithm.advantages import kl_estimate
from areal_core.algorithm.alignment import masked_segment_mean, segment_ids, segment_sum
from areal_core.algorithm.normalization import SumOverRanks, on_one_rank

# Of float32: returns whose relative standard deviation is smaller than this are equal.
ROUNDING = 2.0**-23
Stats = dict[str, Tensor]  # by name, per token unless stated otherwise


def policy_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    level: str = "token",
    weights: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """(loss, statistics without gradient), all [tokens], the loss 0 outside of the loss mask.

    All inputs are [tokens], next-token aligned, packed by `cu_seqlens`. With
    `r = exp(logprobs - proximal_logprobs)`:

        L = max(-A r, -A clamp(r, 1 - eps_clip, 1 + eps_clip_higher))           PPO, arXiv 1707.06347 eq. 7
        L = min(L, -c_clip A)  where A < 0                                      dual clip, arXiv 1912.09729 eq. 5

    `eps_clip_higher` (default: `eps_clip`) is DAPO's clip-higher (arXiv 2503.14476 eq. 10). `level`
    "sequence" uses one ratio per sequence, `exp(mean(logprobs - proximal_logprobs))`, and its mean
    advantage (GSPO, arXiv 2507.18071 eq. 7). `weights` (`off_policy.behaviour_weights`) multiply
    the loss; without them the tokens are treated as sampled by the proximal policy.

    Statistics: loss, importance_weight, approx_kl, clip_mask, dual_clip_mask.

    Raises:
        ValueError: `level` is neither "token" nor "sequence".
    """
    mask = loss_mask.bool()
    log_ratio = torch.where(mask, logprobs - proximal_logprobs, 0.0)
    if level == "sequence":
        log_ratio = masked_segment_mean(log_ratio, mask, cu_seqlens)
        advantages = masked_segment_mean(advantages, mask, cu_seqlens)
    elif level != "token":
        raise ValueError(f"importance sampling level {level!r} is unknown; expected token or sequence")
    ratio = log_ratio.exp()
    higher = eps_clip if eps_clip_higher is None else eps_clip_higher
    clipped_ratio = ratio.clamp(1.0 - eps_clip, 1.0 + higher)
    unclipped, clipped = -advantages * ratio, -advantages * clipped_ratio
    loss = torch.maximum(unclipped, clipped)
    clip_mask = mask & (unclipped < clipped)
    dual_clip_mask = torch.zeros_like(mask)
    if c_clip is not None:
        ceiling = c_clip * advantages.abs()  # the loss exceeds this only where A < 0
        dual_clip_mask = mask & (ceiling < loss)
        loss = torch.where(dual_clip_mask, ceiling, loss)
    if weights is not None:
        loss = loss * weights
    # where, not a product: a masked token may hold inf, and inf * 0 is nan.
    loss = torch.where(mask, loss, 0.0)
    stats = {
        "loss": loss.detach(),
        "importance_weight": torch.where(mask, ratio, 0.0).detach(),
        "approx_kl": torch.where(mask, log_ratio, 0.0).detach(),
        "clip_mask": clip_mask,
        "dual_clip_mask": dual_clip_mask,
    }
    return loss, stats


def cispo_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    eps_clip: float,
    eps_clip_higher: float,
    weights: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """CISPO: the clipped policy ratio as a constant weight; inputs and results as `policy_loss`.

    MiniMax-M1 (arXiv 2506.13585) eq. 4-5: `-clamp(r, 1 - eps_clip, 1 + eps_clip_higher) A log pi`,
    with no gradient through r. Tokens outside of the bounds, marked in `clip_mask`, keep theirs.
    """
    mask = loss_mask.bool()
    log_ratio = torch.where(mask, logprobs - proximal_logprobs, 0.0).detach()
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_higher)
    loss = -clipped * advantages * torch.where(mask, logprobs, 0.0)
    loss = torch.where(mask, loss if weights is None else loss * weights, 0.0)
    stats = {
        "loss": loss.detach(),
        "importance_weight": torch.where(mask, ratio, 0.0),
        "approx_kl": log_ratio,
        "clip_mask": mask & (clipped != ratio),
        "dual_clip_mask": torch.zeros_like(mask),
    }
    return loss, stats


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> tuple[Tensor, Stats]:
    """SAPO: a soft gate on the policy ratio in place of a clip; all inputs [tokens].

    Returns (loss, statistics without gradient), the loss 0 outside of the loss mask.

    Soft Adaptive Policy Optimization (arXiv 2511.20347): `-A * sigmoid(tau (r - 1)) * 4 / tau`, tau
    by the sign of A. At r = 1 the gradient is that of `-A r`; away from 1 it decays, faster for
    negative advantages.

    Statistics: loss, importance_weight, approx_kl, sapo_soft_gate (with its factor 4 / tau), and
    the gates for positive and for negative advantages.
    """
    mask = loss_mask.bool()
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    gate_pos, gate_neg = (torch.sigmoid(tau * (ratio - 1)) * 4 / tau for tau in (tau_pos, tau_neg))
    gate = torch.where(advantages > 0, gate_pos, gate_neg)
    loss = torch.where(mask, -gate * advantages, 0.0)
    stats = {
        "loss": loss.detach(),
        "importance_weight": ratio.detach(),
        "approx_kl": log_ratio.detach(),
        "sapo_soft_gate": gate.detach(),
        "sapo_scaled_gate_pos": gate_pos.detach(),
        "sapo_scaled_gate_neg": gate_neg.detach(),
    }
    return loss, stats


def kl_loss(logprobs: Tensor, reference_logprobs: Tensor, loss_mask: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate the KL of policy and reference with its gradient: [tokens], 0 outside of the mask.

    `advantages.kl_estimate` without its clamp, beyond which there would be no gradient; k3 is
    GRPO's (arXiv 2402.03300 eq. 4). On tokens that the policy sampled, the gradient of k2 is that
    of KL(policy || reference), of k3 that of KL(reference || policy), and of k1 0 on average.
    """
    # where before the estimate: a masked token may hold anything, and inf * 0 is nan
    difference = torch.where(loss_mask.bool(), logprobs - reference_logprobs, 0.0)
    return kl_estimate(difference, torch.zeros_like(difference), estimator, clamp=torch.inf)


def entropy_bonus(entropy: Tensor, loss_mask: Tensor, coefficient: float) -> Tensor:
    """Term added to the loss: `-coefficient * H` [tokens], 0 outside of the loss mask.

    Inputs are [tokens]. `entropy` is that of the full next-token distribution, in nats and with its
    gradient; A3C (arXiv 1602.01783) sec. 4.
    """
    return -coefficient * torch.where(loss_mask.bool(), entropy, 0.0)


def aggregate_loss(
    losses: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, aggregation: str = "token-mean"
) -> Tensor:
    """Sum the losses [tokens] of complete sequences, packed by `cu_seqlens`.

    "seq-mean-token-mean" divides each by the number of its sequence's tokens in the loss mask.
    Divided by the `loss_denominator` of all sequences of a step, this is the objective.
    """
    if aggregation != "seq-mean-token-mean":
        return losses.sum()
    ids, num_rows = segment_ids(cu_seqlens), cu_seqlens.numel() - 1
    lengths = segment_sum(loss_mask.to(losses.dtype), ids, num_rows).clamp(min=1)  # [n]
    return (losses / lengths[ids]).sum()


def loss_denominator(loss_mask: Tensor, aggregation: str = "token-mean", max_length: int = 1) -> Tensor:
    """Return what the `aggregate_loss` of rows is divided by; `loss_mask` is [B, T].

        token-mean               tokens in the loss mask        DAPO, arXiv 2503.14476 eq. 8
        seq-mean-token-mean      rows                           GRPO, 2402.03300 eq. 3
        seq-mean-token-sum       rows                           RLOO, 2402.14740
        seq-mean-token-sum-norm  rows * `max_length`            Dr.GRPO, 2503.20783 sec. 3

    Rows are those with a token in the loss mask.

    Raises:
        ValueError: `aggregation` is none of these.
    """
    mask = loss_mask.bool()
    if aggregation == "token-mean":
        return mask.sum()
    rows = mask.any(1).sum()
    if aggregation in ("seq-mean-token-mean", "seq-mean-token-sum"):
        return rows
    if aggregation == "seq-mean-token-sum-norm":
        return rows * max_length
    raise ValueError(
        f"loss aggregation {aggregation!r} is unknown; expected token-mean, seq-mean-token-mean, "
        "seq-mean-token-sum or seq-mean-token-sum-norm"
    )


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor, *, eps_clip: float = 0.5
) -> tuple[Tensor, Stats]:
    """(sum over the loss mask, per-token statistics without gradient); all inputs [tokens].

    `max((V - R)^2, (V_clipped - R)^2) / 2` with
    `V_clipped = V_old + clamp(V - V_old, -eps_clip, eps_clip)`: the pessimistic counterpart of the
    policy clip, as in the implementation that accompanies arXiv 1707.06347. Statistics: loss,
    clip_mask.
    """
    mask = loss_mask.bool()
    clipped_values = old_values + (values - old_values).clamp(-eps_clip, eps_clip)
    unclipped, clipped = 0.5 * (values - returns) ** 2, 0.5 * (clipped_values - returns) ** 2
    loss = torch.where(mask, torch.maximum(unclipped, clipped), 0.0)
    return loss.sum(), {"loss": loss.detach(), "clip_mask": mask & (clipped > unclipped).detach()}


def explained_variance(
    values: Tensor, returns: Tensor, loss_mask: Tensor, sum_over_ranks: SumOverRanks = on_one_rank
) -> float:
    """`1 - Var(R - V) / Var(R)` over the loss masks of all ranks; inputs of one shape.

    1 for values that predict every return, 0 for a constant, negative for values that are worse
    than a constant; nan where all returns are equal. A collective when `sum_over_ranks` is one.
    """
    mask = loss_mask.bool()
    targets, errors = returns[mask].double(), (returns - values)[mask].double()  # [masked tokens]
    moments = [targets.sum(), (targets**2).sum(), errors.sum(), (errors**2).sum(), mask.sum().double()]
    *sums, count = sum_over_ranks(torch.stack(moments)).tolist()
    if count == 0:
        return math.nan
    target, target_square, error, error_square = (total / count for total in sums)
    variance = target_square - target**2
    if variance <= ROUNDING**2 * target_square:
        return math.nan
    return 1 - (error_square - error**2) / variance


def distillation_loss(
    logprobs: Tensor, teacher_logprobs: Tensor, behaviour_logprobs: Tensor, loss_mask: Tensor
) -> tuple[Tensor, Stats]:
    """(loss, statistics without gradient), the loss 0 outside of the loss mask.

    All are [tokens], next-token aligned.

    `r * stop_gradient(logp - logp_teacher)` with `r = exp(logp - logp_behaviour)`: its mean
    estimates the reverse KL of the policy from the teacher over tokens that the behaviour policy
    sampled (MiniLLM, arXiv 2306.08543; on-policy distillation, 2306.13649), and its gradient that
    KL's. The importance weight carries the gradient: that of `logp - logp_teacher` itself does not
    depend on the teacher, whose logprobs are constants. Statistics: loss.
    """
    mask = loss_mask.bool()
    # where before exp: a masked token may hold anything, and inf * 0 is nan
    ratio = torch.where(mask, logprobs - behaviour_logprobs, 0.0).exp()
    distance = torch.where(mask, logprobs.detach() - teacher_logprobs, 0.0)
    loss = ratio * distance
    return loss, {"loss": loss.detach()}


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


def dpo_loss(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
) -> tuple[Tensor, Stats]:
    """(sum over pairs, statistics [pairs] without gradient).

    Statistics: loss, chosen_reward, rejected_reward, reward_margin, reward_accuracy.

    Inputs are [tokens], next-token aligned, sequences chosen_0, rejected_0, chosen_1, ... Sums are
    float64. With z the log-ratio to the reference of the chosen sequence minus that of the rejected
    one: "sigmoid" is `-log sigmoid(beta z)` (arXiv 2305.18290 eq. 7); "ipo" is
    `(z - 1 / (2 beta))^2` with z per token (arXiv 2310.12036 eq. 17).

    Raises:
        ValueError: `loss_type` is neither.
    """
    ids, num_rows = segment_ids(cu_seqlens), cu_seqlens.numel() - 1
    mask = loss_mask.bool()
    log_ratio = torch.where(mask, logprobs - reference_logprobs, 0.0).double()  # [tokens]
    log_ratio = segment_sum(log_ratio, ids, num_rows)  # [2 pairs]
    chosen, rejected = log_ratio.view(-1, 2).unbind(1)  # [pairs]
    if loss_type == "sigmoid":
        loss = -F.logsigmoid(beta * (chosen - rejected))
    elif loss_type == "ipo":
        lengths = segment_sum(mask.double(), ids, num_rows).clamp(min=1)
        per_token = (log_ratio / lengths).view(-1, 2)
        loss = (per_token[:, 0] - per_token[:, 1] - 1 / (2 * beta)) ** 2
    else:
        raise ValueError(f"DPO loss type {loss_type!r} is unknown; expected sigmoid or ipo")
    margin = (beta * (chosen - rejected)).detach()
    stats = {
        "loss": loss.detach(),
        "chosen_reward": (beta * chosen).detach(),
        "rejected_reward": (beta * rejected).detach(),
        "reward_margin": margin,
        "reward_accuracy": (margin > 0).double(),
    }
    return loss.sum(), stats


def reward_model_loss(scores: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Stats]:
    """(sum over pairs, statistics [pairs]: loss, pos_score, neg_score, correct_ratio).

    `-log sigmoid(chosen - rejected)`, the Bradley-Terry likelihood (arXiv 2203.02155 eq. 1), of
    `scores` [tokens] at the last token of each sequence.
    """
    chosen, rejected = scores[cu_seqlens[1:].long() - 1].view(-1, 2).unbind(1)  # [pairs]
    loss = -F.logsigmoid(chosen - rejected)
    stats = {
        "loss": loss.detach(),
        "pos_score": chosen.detach(),
        "neg_score": rejected.detach(),
        "correct_ratio": (chosen > rejected).detach().float(),
    }
    return loss.sum(), stats
