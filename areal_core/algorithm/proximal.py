"""Proximal logprobs without a forward pass: between behaviour and current policy, by the age of each token."""

import torch
from torch import Tensor


def loglinear_share(versions: Tensor, current_version: int) -> Tensor:
    """How far the proximal policy lies from behaviour (0) towards the current policy (1): float32, shape of `versions`.

    The log-linear rule of A-3PO (arXiv 2512.06547): a token sampled by version b lies on the line from b to
    `current_version`, and the point at `current_version - 1` is taken. Prompt tokens (version -1) and tokens that are not
    older than `current_version` get 0.
    """
    age = current_version - versions
    share = ((age - 1) / age.clamp(min=1)).clamp(0.0, 1.0)
    return torch.where((versions >= 0) & (age > 0), share, 0.0)


def loglinear_proximal_logprobs(logprobs: Tensor, behaviour_logprobs: Tensor, share: Tensor) -> Tensor:
    """Approximate proximal logprobs, without gradient, at `share` (`loglinear_share`) of the way; one shape for all."""
    return behaviour_logprobs + share * (logprobs.detach() - behaviour_logprobs)
