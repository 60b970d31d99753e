"""Rows of a batch from the interactions of a session, with the exact sampled tokens.

`individual`: a row per call. `concat`: a row per conversation, while the prompt of each turn starts
with the exact tokens of the previous one; where it does not (a template that renders a turn
differently), a new row starts, so a row never contains a token that the model did not see.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from areal_core.batch import FINISH_REASONS, pad_and_concat
from areal_core.rollout.agent.conversation import Interaction
from areal_core.rollout.agent.rewards import discounted
from areal_core.rollout.types import ModelResponse


def export_rows(
    interactions: Sequence[Interaction], rewards: Mapping[str, float], turn_discount: float, style: str
) -> dict[str, Tensor]:
    """Return the rows of one episode.

    Args:
        interactions: the answered calls, in order; at least one.
        rewards: by interaction id; a missing one is 0.
        turn_discount: see `rewards.discounted`.
        style: "individual" rewards a call with its return over all later calls; "concat" rewards a
            row with the return of its first turn over the turns of the row.

    Returns:
        Keys and dtypes of ARCHITECTURE.md, "The batch", `[n, T]` and `[n]`.
    """

    def own(turns: Sequence[Interaction]) -> list[float]:
        return discounted([rewards.get(t.id, 0.0) for t in turns], turn_discount)

    if style == "concat":
        chains = conversations(interactions)
        rows = [conversation_row([t.response for t in chain], own(chain)[0]) for chain in chains]
    else:
        rows = [
            conversation_row([turn.response], reward)
            for turn, reward in zip(interactions, own(interactions), strict=True)
        ]
    return pad_and_concat(rows)


def conversations(interactions: Sequence[Interaction]) -> list[list[Interaction]]:
    """Return the root-to-leaf paths of the tree of calls.

    The parent of a call is the longest earlier call whose tokens are a prefix of its prompt.
    """
    chains: dict[int, list[Interaction]] = {}
    leaves: set[int] = set()
    for index, interaction in enumerate(interactions):
        prompt = interaction.response.input_tokens
        parents = [i for i in chains if prompt[: len(interactions[i].tokens)] == interactions[i].tokens]
        parent = max(parents, key=lambda i: len(interactions[i].tokens), default=None)
        chains[index] = [*(chains[parent] if parent is not None else []), interaction]
        leaves = (leaves - {parent}) | {index}
    return [chains[index] for index in sorted(leaves)]


def conversation_row(turns: Sequence[ModelResponse], reward: float) -> dict[str, Tensor]:
    """Return one row, `[1, T]` per token and `[1]` per row, of turns that each continue the last.

    The tokens that a prompt adds (a tool's output, a user's answer) are outside of the loss mask:
    mask 0, logprob 0, version -1.
    """
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for turn in turns:
        assert turn.input_tokens[: len(tokens)] == tokens
        num_added, num_sampled = len(turn.input_tokens) - len(tokens), len(turn.output_tokens)
        tokens = turn.input_tokens + turn.output_tokens
        mask += [0] * num_added + [1] * num_sampled
        logprobs += [0.0] * num_added + turn.output_logprobs
        versions += [-1] * num_added + turn.output_versions
    return {
        "input_ids": torch.tensor([tokens], dtype=torch.int32),
        "attention_mask": torch.ones(1, len(tokens), dtype=torch.bool),
        "loss_mask": torch.tensor([mask], dtype=torch.int32),
        "logprobs": torch.tensor([logprobs], dtype=torch.float32),
        "versions": torch.tensor([versions], dtype=torch.int32),
        "rewards": torch.tensor([reward], dtype=torch.float32),
        "finish_reason": torch.tensor([FINISH_REASONS.index(turns[-1].stop_reason)], dtype=torch.int32),
    }
