"""Estimates of KL(policy || reference) from one sampled token each.

J. Schulman, "Approximating KL divergence", 2020.
"""

import torch
from torch import Tensor


def kl_estimate(
    logprobs: Tensor, reference_logprobs: Tensor, estimator: str = "k1", clamp: float = 10.0
) -> Tensor:
    """Per-token estimate, in the shape of `logprobs`, clamped to `[-clamp, clamp]`.

    With `d = log pi - log pi_ref`: k1 = d, unbiased but noisy; k2 = d^2 / 2, biased, its gradient
    is the KL's; k3 = exp(-d) - 1 + d, unbiased and never negative.

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
