"""Rows of a batch from the tree of an episode, with the exact sampled tokens and rewards.

`individual`: a row per call. `concat`: a row per path of the tree (`episode_tree.py`), while the
prompt of each turn starts with the exact tokens of the previous one; where it does not (a template
that renders a turn differently), a new row starts, so a row never contains a token that the model
did not see. A turn that several paths share is in the loss mask of the first of these rows only.

Rewards come from the result of an agent's `run` or from `/rl/set_reward`, one per completion.
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from areal_core.agent.conversation import BRANCHES, Interaction
from areal_core.agent.episode_tree import Path, Turn, paths
from areal_core.agent.errors import NoCompletion, WrongReward
from areal_core.agent.failures import FAILURES
from areal_core.data.batch import pad_and_concat
from areal_core.data.processor import VisionProcessor
from areal_core.engine.vision_models import image_keys
from areal_core.rollout.workflow import conversation_row

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
    returns: list[float] = []
    for reward in reversed(own):
        returns.append(reward + turn_discount * (returns[-1] if returns else 0.0))
    return returns[::-1]


def export_rows(
    tree: Sequence[Turn],
    rewards: Mapping[str, float],
    turn_discount: float,
    style: str,
    failure: str | None = None,
    processor: VisionProcessor | None = None,
) -> dict[str, Tensor]:
    """Return the rows of one episode.

    Rewards are discounted over all calls of the episode, in the order of their requests and across
    branches; a row gets the return of the first call that it trains. So a branch that ended early,
    for example before its context was compacted, is credited with what came of the episode.

    Args:
        tree: the answered calls; at least one.
        rewards: by interaction id; a missing one is 0.
        turn_discount: see `discounted`.
        style: "individual" makes a row of each call, "concat" of each path of `paths`.
        failure: a member of `FAILURES` if the model failed the episode.
        processor: of a vision model, whose rows have pictures.

    Returns:
        Keys and dtypes of ARCHITECTURE.md, "The batch", `[n, T]` and `[n]`.
    """
    returns = discounted([rewards.get(turn.interaction.id, 0.0) for turn in tree], turn_discount)
    rows = []
    for path in rows_of(tree, style):
        interactions = [tree[i].interaction for i in path.turns]
        first, reward = tree[path.first_own], returns[path.first_own]
        parent = -1 if first.parent is None else tree[first.parent].interaction.turn
        turns = turns_of_tokens(interactions)
        row = conversation_row([turn.response for turn in interactions], reward, path.num_shared) | {
            "turns": turns,
            "parent_turn": torch.tensor([parent], dtype=torch.int32),
            "branch": torch.tensor([BRANCHES.index(first.branch)], dtype=torch.int32),
            "failure": torch.tensor([FAILURES.index(failure)], dtype=torch.int32),
        }
        if processor is not None:
            is_placeholder = (row["input_ids"] == processor.image_token_id) & (turns == 0)
            row |= {"mm_token_type_ids": is_placeholder.int(), **image_keys([interactions[-1].call.images])}
        rows.append(row)
    return pad_and_concat(rows)


def rows_of(tree: Sequence[Turn], style: str) -> list[Path]:
    """Return the calls of each row in an export style."""
    return paths(tree) if style == "concat" else [Path((i,)) for i in range(len(tree))]


def turns_of_tokens(interactions: Sequence[Interaction]) -> Tensor:
    """Return 1 + the number of the call that sampled each token, 0 for other tokens: `[1, T]`."""
    turns: list[int] = []
    for interaction in interactions:
        turns += [0] * (len(interaction.response.input_tokens) - len(turns))
        turns += [interaction.turn + 1] * len(interaction.response.output_tokens)
    return torch.tensor([turns], dtype=torch.int32)
