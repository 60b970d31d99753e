"""Direct preference optimisation, on packed pairs: chosen and rejected sequences alternate."""

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_core.algorithm.segments import segment_ids, segment_sum


def dpo_loss(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
) -> tuple[Tensor, dict[str, Tensor]]:
    """(sum over pairs, statistics [pairs] without gradient).

    Statistics: loss, chosen_reward, rejected_reward, reward_margin, reward_accuracy.


    Inputs are [tokens], next-token aligned, sequences chosen_0, rejected_0, chosen_1, ... Sums are
    float64. With z the log-ratio to the reference of the chosen sequence minus that of the rejected
    one: "sigmoid" is `-log sigmoid(beta z)` (arXiv 2305.18290 eq. 7); "ipo" is
    `(z - 1 / (2 beta))^2` with z per token (arXiv 2310.12036 eq. 17).

    Raises:
        ValueError: `loss_type` is neither.
    """
    ids, num_rows = segment_ids(cu_seqlens), cu_seqlens.numel() - 1
    mask = loss_mask.bool()
    log_ratio = torch.where(mask, logprobs - reference_logprobs, 0.0).double()  # [tokens]
    log_ratio = segment_sum(log_ratio, ids, num_rows)  # [2 pairs]
    chosen, rejected = log_ratio.view(-1, 2).unbind(1)  # [pairs]
    if loss_type == "sigmoid":
        loss = -F.logsigmoid(beta * (chosen - rejected))
    elif loss_type == "ipo":
        lengths = segment_sum(mask.double(), ids, num_rows).clamp(min=1)
        per_token = (log_ratio / lengths).view(-1, 2)
        loss = (per_token[:, 0] - per_token[:, 1] - 1 / (2 * beta)) ** 2
    else:
        raise ValueError(f"DPO loss type {loss_type!r} is unknown; expected sigmoid or ipo")
    margin = (beta * (chosen - rejected)).detach()
    stats = {
        "loss": loss.detach(),
        "chosen_reward": (beta * chosen).detach(),
        "rejected_reward": (beta * rejected).detach(),
        "reward_margin": margin,
        "reward_accuracy": (margin > 0).double(),
    }
    return loss.sum(), stats
