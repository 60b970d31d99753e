"""The loss of supervised fine-tuning, on packed tokens."""

import torch
from torch import Tensor


def sft_loss(logprobs: Tensor, loss_mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(negative log-likelihood summed over trainable tokens, statistics: loss per token); inputs [tokens], aligned."""
    loss = torch.where(loss_mask.bool(), -logprobs, 0.0)
    return loss.sum(), {"loss": loss.detach()}
