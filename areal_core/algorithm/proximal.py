"""Proximal logprobs without a forward pass: between behaviour and current policy, by the age of each token."""

import torch
from torch import Tensor


def loglinear_proximal_logprobs(
    logprobs: Tensor, behaviour_logprobs: Tensor, versions: Tensor, current_version: int
) -> Tensor:
    """Approximate logprobs under the weights of `current_version - 1`, without gradient, in the shape of the inputs.

    A token sampled at version b lies on the line from its behaviour logprob (at b) to its current one (at
    `current_version`); the point at `current_version - 1` is taken. Prompt tokens (version -1) and tokens that are not
    older than `current_version` keep the behaviour logprob.
    """
    age = current_version - versions
    share = ((age - 1) / age.clamp(min=1)).clamp(0.0, 1.0)
    share = torch.where((versions >= 0) & (age > 0), share, 0.0)
    return behaviour_logprobs + share * (logprobs.detach() - behaviour_logprobs)
