"""Rows of a batch from the interactions of a session, with the exact sampled tokens and rewards.

`individual`: a row per call. `concat`: a row per conversation, while the prompt of each turn starts
with the exact tokens of the previous one; where it does not (a template that renders a turn
differently), a new row starts, so a row never contains a token that the model did not see.

Rewards come from the result of an agent's `run` or from `/rl/set_reward`, one per completion.
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from areal_core.agent.conversation import Interaction
from areal_core.agent.errors import NoCompletion, WrongReward
from areal_core.batch import FINISH_REASONS, pad_and_concat
from areal_core.rollout.types import ModelResponse

EXPECTED = "expected a number for the last completion, or a dict of completion ids and numbers"


def rewards_by_id(
    returned: Any, interactions: Sequence[Interaction], set_by_agent: Mapping[str, float], agent: str
) -> dict[str, float]:
    """Return the rewards of a run, by the id of the interaction.

    Args:
        returned: a number for the last completion, a dict by completion id, or None if
            `set_by_agent` has all.
        interactions: the answered calls, in order.
        set_by_agent: rewards set through `/rl/set_reward`.
        agent: its name, for the message.

    Raises:
        NoCompletion: the run never called the model.
        WrongReward: anything else, a number that is not finite, or an id of another run.
    """
    if not interactions:
        raise NoCompletion(
            f"{agent} ended without a call to the model that was answered: give its client the base_url and api_key that run() gets"
        )
    known = [interaction.id for interaction in interactions]
    if returned is None and set_by_agent:
        given: Mapping[Any, Any] = {}
    else:
        given = returned if isinstance(returned, Mapping) else {known[-1]: returned}
    if isinstance(returned, Mapping) and not returned and not set_by_agent:
        raise WrongReward(f"{agent} returned an empty dict; {EXPECTED}")
    for id, reward in given.items():
        if id not in known:
            raise WrongReward(
                f"{agent} rewarded {id!r}, which is not a completion of this run; it has {', '.join(known)}"
            )
        if not isinstance(reward, numbers.Real):
            raise WrongReward(f"{agent} returned {str(reward)[:80]!r} ({type(reward).__name__}); {EXPECTED}")
        if not math.isfinite(reward):
            raise WrongReward(f"{agent} returned {reward}, which is not finite; {EXPECTED}")
    return {**set_by_agent, **{id: float(reward) for id, reward in given.items()}}


def discounted(own: Sequence[float], turn_discount: float) -> list[float]:
    """Return the return of each turn: its reward plus `turn_discount` times the next return."""
    returns: list[float] = []
    for reward in reversed(own):
        returns.append(reward + turn_discount * (returns[-1] if returns else 0.0))
    return returns[::-1]


def export_rows(
    interactions: Sequence[Interaction], rewards: Mapping[str, float], turn_discount: float, style: str
) -> dict[str, Tensor]:
    """Return the rows of one episode.

    Args:
        interactions: the answered calls, in order; at least one.
        rewards: by interaction id; a missing one is 0.
        turn_discount: see `discounted`.
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
