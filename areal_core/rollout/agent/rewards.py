"""One reward per completion, from the result of an agent's `run`."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from areal_core.rollout.agent.conversation import Interaction
from areal_core.rollout.agent.errors import NoCompletion, WrongReward

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
