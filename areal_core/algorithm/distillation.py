"""On-policy distillation from a teacher, on packed tokens."""

import torch
from torch import Tensor


def distillation_loss(
    logprobs: Tensor, teacher_logprobs: Tensor, behaviour_logprobs: Tensor, loss_mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """(sum over the loss mask, per-token statistics without gradient).

    All inputs are [tokens], next-token aligned.

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
    return loss.sum(), {"loss": loss.detach()}
