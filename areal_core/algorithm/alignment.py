"""One place where tokens become next-token positions: afterwards position t speaks of token t + 1, everywhere."""

import torch
from torch import Tensor

ROLLED = ("loss_mask", "logprobs", "versions")
LAST = {"loss_mask": 0, "logprobs": 0, "versions": -1}


def to_next_token(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch whose `loss_mask`, `logprobs` and `versions` [B, T] are moved by one to the left; the rest is shared.

    The last column has no next token: mask 0, logprob 0, version -1. The three must move together: a version that
    stays behind its mask puts every staleness number off by one token.
    """
    return batch | {key: shifted_left(batch[key], LAST[key]) for key in ROLLED}


def shifted_left(values: Tensor, last: float) -> Tensor:
    """[B, T] -> [B, T]: column t holds column t + 1 of `values`, the last column holds `last`."""
    end = torch.full_like(values[:, :1], last)  # [B, 1]
    return torch.cat([values[:, 1:], end], dim=1)
