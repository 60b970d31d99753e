"""A bonus for entropy, so that a policy goes on exploring."""

import torch
from torch import Tensor


def entropy_bonus(entropy: Tensor, loss_mask: Tensor, coefficient: float) -> Tensor:
    """What is added to the loss, summed over trainable tokens: `-coefficient * H` of each; inputs are [tokens].

    `entropy` is that of the whole next-token distribution, in nats and with its gradient; A3C (arXiv 1602.01783) sec. 4.
    """
    return -coefficient * torch.where(loss_mask.bool(), entropy, 0.0).sum()
