"""Proximal logprobs without a forward pass: interpolated by the staleness of each token."""

import torch
from torch import Tensor


def loglinear_share(versions: Tensor, current_version: int) -> Tensor:
    """Position of the proximal policy between behaviour (0) and current policy (1), float32.

    It has the shape of `versions`. The log-linear rule of A-3PO (arXiv 2512.06547): for a token
    sampled by version b, it is the point of version `current_version - 1` on the line from b to
    `current_version`. It is 0 for prompt tokens (version -1) and tokens that are not older than
    `current_version`.
    """
    staleness = current_version - versions
    share = ((staleness - 1) / staleness.clamp(min=1)).clamp(0.0, 1.0)
    return torch.where((versions >= 0) & (staleness > 0), share, 0.0)


def loglinear_proximal_logprobs(logprobs: Tensor, behaviour_logprobs: Tensor, share: Tensor) -> Tensor:
    """Approximate proximal logprobs without gradient at `share` (`loglinear_share`).

    All tensors have one shape.
    """
    return behaviour_logprobs + share * (logprobs.detach() - behaviour_logprobs)
