"""Errors of approximated proximal log-probs, logged by `prox_logp_method: metrics`.

They show whether `loglinear` can be trusted on a run.
"""

import torch
from torch import Tensor

from areal_core.algorithm.proximal import loglinear_proximal_logprobs
from areal_core.telemetry import Stats


def log_approximations(
    stats: Stats, logprobs: Tensor, computed: Tensor, behaviour_logprobs: Tensor, share: Tensor
) -> None:
    """Record the errors of each approximation under `compute_logp/`; all tensors are [tokens].

    The denominator `n_valid_tokens` is that of an enclosing scope.

    Args:
        computed: proximal log-probs of a forward pass.
        share: `loglinear_share` of each token.
    """
    logprobs = logprobs.detach()
    weights = (computed - behaviour_logprobs).exp()
    moved = logprobs - behaviour_logprobs
    with stats.scope("compute_logp"):
        stats.stat(
            "n_valid_tokens",
            prox_logp_gt=computed,
            kl_div_direct=-moved,
            kl_div_taylor=moved**2 / 2,
            kl_div_dual=moved.expm1() - moved,
        )
        for name, approximate in approximations(logprobs, behaviour_logprobs, share).items():
            error = (approximate - computed).abs()
            approximate_weights = (approximate - behaviour_logprobs).exp()
            with stats.scope(name):
                stats.stat(
                    "n_valid_tokens",
                    approx_logp=approximate,
                    abs_error=error,
                    rel_error=error / computed.abs().clamp(min=1e-8),
                    squared_error=error**2,
                    importance_weight=(logprobs - approximate).exp(),
                    behave_imp_weight=approximate_weights,
                    behave_imp_weight_abs_error=(approximate_weights - weights).abs(),
                )


def approximations(logprobs: Tensor, behaviour_logprobs: Tensor, share: Tensor) -> dict[str, Tensor]:
    """Return each approximation of the proximal log-probs, [tokens].

    "loglinear" interpolates log-probs, "linear" probabilities; "rollout" takes the engine's
    log-probs.
    """
    return {
        "loglinear": loglinear_proximal_logprobs(logprobs, behaviour_logprobs, share),
        "linear": torch.logaddexp(behaviour_logprobs + (1 - share).log(), logprobs + share.log()),
        "rollout": behaviour_logprobs,
    }
