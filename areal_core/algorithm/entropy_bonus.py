"""An entropy bonus, which keeps a policy exploring."""

import torch
from torch import Tensor


def entropy_bonus(entropy: Tensor, loss_mask: Tensor, coefficient: float) -> Tensor:
    """Term added to the loss: the sum of `-coefficient * H` over the loss mask.

    Inputs are [tokens]. `entropy` is that of the full next-token distribution, in nats and with its
    gradient; A3C (arXiv 1602.01783) sec. 4.
    """
    return -coefficient * torch.where(loss_mask.bool(), entropy, 0.0).sum()
