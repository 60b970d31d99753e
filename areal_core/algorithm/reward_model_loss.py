"""The pairwise loss of a reward model, on packed pairs: chosen and rejected sequences alternate."""

import torch.nn.functional as F
from torch import Tensor


def reward_model_loss(scores: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(sum over pairs, statistics [pairs]: loss, pos_score, neg_score, correct_ratio).

    `-log sigmoid(chosen - rejected)`, the Bradley-Terry likelihood (arXiv 2203.02155 eq. 1), of
    `scores` [tokens] at the last token of each sequence.
    """
    chosen, rejected = scores[cu_seqlens[1:].long() - 1].view(-1, 2).unbind(1)  # [pairs]
    loss = -F.logsigmoid(chosen - rejected)
    stats = {
        "loss": loss.detach(),
        "pos_score": chosen.detach(),
        "neg_score": rejected.detach(),
        "correct_ratio": (chosen > rejected).detach().float(),
    }
    return loss.sum(), stats
