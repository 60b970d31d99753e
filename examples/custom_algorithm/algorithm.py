"""An algorithm of one's own: reward, workflow, filter, reward shaping, advantages and loss.

docs/custom_algorithms.md has the arguments, shapes and results of each. Only `loss` is needed to
change the loss; the other functions are here to be copied.
"""

from typing import Any

import torch
from torch import Tensor

from areal_core.rollout.workflow import RLVRWorkflow

Batch = dict[str, Tensor]


def even_share(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any
) -> float:
    """The reward: the share of even token ids, which even a model with random weights can learn."""
    return sum(token % 2 == 0 for token in completion_ids) / max(len(completion_ids), 1)


class WithSystemPrompt(RLVRWorkflow):
    """A workflow: sample as `RLVRWorkflow` does, with a fixed system prompt in front."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Batch:
        """Run one episode; `data` is a row of the dataset."""
        messages = [{"role": "system", "content": "="}, *data["messages"]]
        return await super().arun_episode(engine, data | {"messages": messages})


def is_mixed(rows: Batch) -> bool:
    """The filter: train on a prompt whose samples are not all alike."""
    return bool(rows["rewards"].max() - rows["rewards"].min() > 0.01)


def shorter_is_better(rewards: Tensor, batch: Batch, length_penalty: float = 0.0) -> Tensor:
    """Shape rewards [B]: a penalty for each sampled token."""
    return rewards - length_penalty * batch["loss_mask"].sum(1)


def leave_one_out(rewards: Tensor, inputs: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute advantages [B, T]: the reward minus the mean of the prompt's other samples (RLOO)."""
    _, group, counts = torch.unique(inputs["prompt_id"], return_inverse=True, return_counts=True)
    total = torch.zeros(len(counts)).scatter_add_(0, group, rewards.float().cpu()).to(rewards.device)
    count = counts[group]
    others = (total[group] - rewards) / (count - 1).clamp(min=1)
    advantages = (rewards - others)[:, None] * inputs["loss_mask"]
    return advantages, {"baseline": others[:, None].expand_as(advantages)}


def cispo(
    logprobs: Tensor, entropy: Tensor, batch: Batch, ceiling: float = 2.0
) -> tuple[Tensor, dict[str, Tensor | float]]:
    """Compute losses [tokens]: a clipped ratio without gradient as the weight of log-probs.

    MiniMax-M1, arXiv 2506.13585, eq. 4: no token is left out of the gradient.
    """
    ratio = (logprobs - batch["prox_logp"]).exp().detach()
    losses = -ratio.clamp(max=ceiling) * batch["advantages"] * logprobs
    return losses, {"cut": (ratio > ceiling).float(), "ceiling": ceiling}
