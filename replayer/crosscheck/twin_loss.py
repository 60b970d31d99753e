"""The loss of an update in float64, its rounding bound, and its gradient by log-probs."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from replayer.crosscheck.options import Options
from replayer.crosscheck.step_rows import Floats, StepRows, Update
from replayer.crosscheck.twin import UNIT, Bounded, mask_of, old_logprobs, sum_error

PER_TOKEN = 12 * UNIT  # operations of a token's loss: subtract, exp, clamp, two products, weight, KL


@dataclass(frozen=True)
class LossInputs:
    """What the loss of an update needs, of its n rows: matrices [n, T] in float64.

    Attributes:
        current: log-probs of the weights that the update starts from; `noise`: how far those of
            the recorded run may be from them.
        ranks: number of each row's rank, [n].
    """

    mask: Tensor
    advantages: Tensor
    error: Tensor
    current: Tensor
    noise: float
    old: Tensor | None
    rollout: Tensor
    proximal: Tensor | None
    reference: Tensor | None
    ranks: Tensor


@dataclass(frozen=True)
class Loss:
    """The loss, its rounding bound, its rows' shares [n], and its gradient by `current` [n, T]."""

    value: float
    error: float
    shares: Floats
    gradient: Tensor


def loss_inputs(
    rows: StepRows, options: Options, update: Update, advantages: Bounded, current: Floats
) -> LossInputs:
    """Select the rows of an update. Values outside of the tokens that count become 0."""
    mask = mask_of(rows, options)[update.rows]

    def chosen(matrix: Floats | None) -> Tensor | None:
        return None if matrix is None else torch.from_numpy(np.where(mask, matrix[update.rows], 0.0))

    def given(matrix: Floats) -> Tensor:
        return torch.from_numpy(np.where(mask, matrix[update.rows], 0.0))

    return LossInputs(
        mask=torch.from_numpy(mask),
        advantages=given(advantages.value),
        error=given(advantages.error),
        current=given(current),
        noise=rows.noise,
        old=chosen(old_logprobs(rows, options)),
        rollout=given(rows.tensors["logprobs"]),
        proximal=chosen(rows.tensors.get("prox_logp")),
        reference=chosen(rows.tensors.get("ref_logp")),
        ranks=torch.from_numpy(rows.place[update.rows, 0]),
    )


def loss_of(given: LossInputs, options: Options) -> Loss:
    """Compute the clipped policy loss, its correction and its KL, aggregated."""
    current = given.current.clone().requires_grad_(True)
    losses, weight, ratio = token_losses(replace(given, current=current), options)
    scale = scales(given, options)  # [n, T]
    total = (losses * scale).sum()
    (gradient,) = torch.autograd.grad(total, current)
    losses = losses.detach()
    size = (losses.abs() * scale).sum()
    count = int(given.mask.sum())
    shaken = (ratio * weight * given.advantages.abs() + kl_slope(given, options)) * (
        given.noise + 2 * UNIT * ratio.log().abs()
    )
    error = (shaken + ratio * weight * given.error) * scale
    return Loss(
        value=float(total.detach()),
        error=float(error.sum() + size * (PER_TOKEN + 2 * float(sum_error(count)))),
        shares=(losses * scale).sum(1).numpy(),
        gradient=gradient,
    )


def token_losses(given: LossInputs, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss, weight for the sampling policy, ratio), each [n, T]."""
    mask, advantages = given.mask, given.advantages
    old = given.current.detach() if given.old is None else given.old
    log_ratio = torch.where(mask, given.current - old, 0.0)
    if options.ratio_level != "token":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
        if options.ratio_level == "sequence":
            log_ratio = log_ratio / mask.sum(1, keepdim=True).clamp(min=1)
    ratio = log_ratio.exp()
    high = options.clip_low if options.clip_high is None else options.clip_high
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - options.clip_low, 1 + high))
    if options.dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * options.dual_clip), losses)
    weight = correction(given, options)
    losses = losses * weight
    if options.kl_coef != 0.0 and given.reference is not None:
        kl = kl_terms(given.current - given.reference, options.kl_estimator)
        losses = losses + options.kl_coef * (kl * ratio if options.kl_weight == "ratio" else kl)
    return torch.where(mask, losses, 0.0), weight, ratio.detach()


def kl_terms(difference: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return difference**2 / 2
    return torch.expm1(-difference) + difference


def kl_slope(given: LossInputs, options: Options) -> Tensor:
    """Bound the change of the KL's share of the loss with a log-prob, [n, T]."""
    if options.kl_coef == 0.0 or given.reference is None:
        return torch.zeros_like(given.advantages)
    difference = (given.current - given.reference).abs()
    return abs(options.kl_coef) * 2 * (1 + difference + difference.exp())


def correction(given: LossInputs, options: Options) -> Tensor:
    """Return the weight of each token for the policy that sampled it, [n, T]."""
    if options.correction is None or given.proximal is None:
        return torch.ones_like(given.advantages)
    log_weight = torch.where(given.mask, given.proximal - given.rollout, 0.0)
    if options.correction.endswith("sequences"):
        log_weight = log_weight.sum(1, keepdim=True).expand_as(log_weight)
    weight, cap = log_weight.exp(), options.correction_cap
    if cap is None:
        return weight
    if options.correction.startswith("truncated"):
        return weight.clamp(max=cap)
    return torch.where(weight > cap, 0.0, weight)


def scales(given: LossInputs, options: Options) -> Tensor:
    """Return the factor of each token's loss in the aggregated loss, [n, T]."""
    mask, how = given.mask, options.aggregation
    ones = torch.ones(mask.shape, dtype=torch.float64)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    num_rows = len(mask) if options.empty_rows == "counted" else max(int(mask.any(1).sum()), 1)
    if how == "token-mean":
        return ones / max(int(mask.sum()), 1)
    if how == "token-mean of each rank":
        of_rank = torch.stack([mask[given.ranks == rank].sum() for rank in given.ranks]).clamp(min=1)
        return ones / of_rank[:, None] / len(given.ranks.unique())
    if how == "token-sum":
        return ones
    if how == "seq-mean-token-mean":
        return ones / lengths / num_rows
    if how == "seq-mean-token-sum":
        return ones / num_rows
    return ones / num_rows / options.max_length
