"""Lambda of GAE as a function of a row's length: `actor.gae_lambda` has the import path of one.

Called once a batch as `function(lengths, **actor.gae_lambda_kwargs)`, it returns a lambda for each
row, [B] float. `lengths` has three int64 tensors [B]: `effective_token_lengths`, `turn_counts`, and
`timestep_lengths`, which is the one of them that `actor.gae_timestep_unit` names.
"""

import math

import torch
from torch import Tensor

from areal_core.algorithm.advantages import runs_of

Lengths = dict[str, Tensor]


def lengths_of(mask: Tensor, turns: Tensor | None, unit: str) -> Lengths:
    """Count tokens and turns in the loss mask; `turns` [B, T] integers, else runs of the mask."""
    steps = (runs_of(mask) if turns is None else turns * mask).sort(1).values  # [B, T]
    counts = (steps.diff(dim=1, prepend=torch.zeros_like(steps[:, :1])) != 0).sum(1)
    tokens = mask.sum(1)
    return {
        "effective_token_lengths": tokens,
        "turn_counts": counts,
        "timestep_lengths": tokens if unit == "token" else counts,
    }


def vapo_length_adaptive_gae(lengths: Lengths, *, alpha: float) -> Tensor:
    """`max(0, 1 - 1 / (alpha * length))`, 0 for empty rows: VAPO, arXiv 2504.05118 eq. 7."""
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not alpha > 0:
        raise ValueError(f"actor.gae_lambda_kwargs.alpha is {alpha!r}; expected a number above 0")
    steps = lengths["timestep_lengths"]
    decayed = 1 - 1 / (alpha * steps.clamp(min=1).float())
    return torch.where(steps > 0, decayed.clamp(min=0.0), 0.0)


def relative_position_gae_lambda(lengths: Lengths, *, q: float) -> Tensor:
    """`q ** (1 / (length - 1))`: of a last reward, the first step keeps the share q.

    1 for rows of one step, 0 for empty ones.
    """
    if isinstance(q, bool) or not isinstance(q, int | float) or not 0 < q <= 1:
        raise ValueError(f"actor.gae_lambda_kwargs.q is {q!r}; expected a number above 0, up to 1")
    steps = lengths["timestep_lengths"]
    return torch.exp(math.log(q) / (steps - 1).clamp(min=1).float()).where(steps > 1, (steps == 1).float())
