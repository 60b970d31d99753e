"""Estimators of divergence from D = trainer - engine of sampled tokens."""

import numpy as np

from consistency.tokens import Floats

LARGEST_EXPONENT = 700.0  # exp() overflows at 709.8


def ratio(difference: Floats) -> Floats:
    """rho = exp(D), [n]."""
    return np.exp(np.minimum(difference, LARGEST_EXPONENT))


def k3(difference: Floats) -> Floats:
    """exp(D) - 1 - D per token, never negative; expm1 keeps small values exact."""
    bounded = np.minimum(difference, LARGEST_EXPONENT)
    return np.expm1(bounded) - bounded


def effective_share(log_ratio: Floats) -> float:
    """Effective sample size per sample, (mean rho)^2 / mean rho^2, of log ratios [n]."""
    scaled = np.exp(log_ratio - log_ratio.max())
    return float(scaled.mean() ** 2 / np.mean(scaled**2))


def correlation(left: Floats, right: Floats) -> float:
    """Pearson's correlation; 0 if one side is constant."""
    left, right = left - left.mean(), right - right.mean()
    scale = np.sqrt((left @ left) * (right @ right))
    return float(left @ right / scale) if scale > 0 else 0.0
