"""M2PO: drop just so many of the most off-policy tokens that the rest stays within a second-moment budget."""

import torch
from torch import Tensor


def second_moment_mask(
    proximal_logprobs: Tensor, behaviour_logprobs: Tensor, loss_mask: Tensor, threshold: float
) -> Tensor:
    """The tokens that are kept: bool [tokens], a subset of `loss_mask`; inputs [tokens].

    Second-Moment Trust Policy Optimization (arXiv 2510.01161): of the squared log-ratios the largest are dropped until
    the mean of the others is below `threshold`. At least one token stays.
    """
    mask = loss_mask.bool()
    # On the CPU, because a sum that runs along floats has no deterministic kernel on CUDA.
    squares = (proximal_logprobs - behaviour_logprobs).detach()[mask].cpu() ** 2  # [n]
    ascending, order = squares.double().sort(stable=True)
    means = ascending.cumsum(0) / torch.arange(1, len(squares) + 1)  # never falling
    num_kept = (means < threshold).sum().clamp(min=1)
    kept = torch.zeros_like(squares, dtype=torch.bool)
    kept[order] = torch.arange(len(squares)) < num_kept
    return torch.zeros_like(mask).masked_scatter(mask, kept.to(mask.device))
