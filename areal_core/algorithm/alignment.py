"""The one place that aligns values to the next token: position t then refers to token t + 1."""

import torch
from torch import Tensor

ROLLED = ("loss_mask", "logprobs", "versions")
LAST = {"loss_mask": 0, "logprobs": 0, "versions": -1}


def to_next_token(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch with `loss_mask`, `logprobs` and `versions` [B, T] shifted left by one.

    The other tensors are shared. The last column has no next token: mask 0, logprob 0, version -1.
    The three must be shifted together: a version that is not shifted with its mask puts every
    staleness statistic off by one token.
    """
    return batch | {key: shifted_left(batch[key], LAST[key]) for key in ROLLED}


def shifted_left(values: Tensor, last: float) -> Tensor:
    """Shift columns of [B, T] left by one: column t is column t + 1, the last column is `last`."""
    end = torch.full_like(values[:, :1], last)  # [B, 1]
    return torch.cat([values[:, 1:], end], dim=1)
