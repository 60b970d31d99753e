"""Agents for questions with a verifiable answer, written with plain `openai`.

A row has `messages` and `answer`; a completion is right if `gsm8k_reward_fn` says so.
"""

import asyncio
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from areal_core.agent.multi_turn import FEEDBACK
from areal_core.reward.functions import gsm8k_reward_fn


class MathAgent:
    """Ask once; the reward is 1.0 for the right answer, else 0.0.

    Args:
        options: of a chat completion, `temperature` for example. The length of the completion is
            `max_completion_tokens` or `max_new_tokens`; next to them `max_tokens`, which counts the
            prompt too in AReaL's files, has no effect.
    """

    def __init__(self, **options: Any) -> None:
        self.options = completion_options(options)

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        """Return the reward of one completion."""
        reply = await client_of(extra).chat.completions.create(
            model="policy", messages=data["messages"], **self.options
        )
        return await reward_of(reply, data)


class MultiTurnMathAgent:
    """Ask until the answer is right, at most `max_turns` times, with feedback in between.

    Args:
        max_turns: maximum number of attempts.
        options: as for `MathAgent`.
    """

    def __init__(self, max_turns: int = 8, **options: Any) -> None:
        self.max_turns = max_turns
        self.options = completion_options(options)

    async def run(self, data: dict[str, Any], **extra: Any) -> dict[str, float]:
        """Return the reward of each attempt, by the id of its completion."""
        client, messages = client_of(extra), list(data["messages"])
        rewards: dict[str, float] = {}
        for _ in range(self.max_turns):
            reply = await client.chat.completions.create(model="policy", messages=messages, **self.options)
            rewards[reply.id] = await reward_of(reply, data)
            if rewards[reply.id] == 1.0:
                break
            answer = reply.choices[0].message.model_dump(exclude_none=True)
            messages += [answer, {"role": "user", "content": FEEDBACK}]
        return rewards


def completion_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request; `max_new_tokens` is a name of AReaL."""
    fields = {name: value for name, value in options.items() if name != "max_new_tokens"}
    if "max_new_tokens" in options:
        fields.setdefault("max_completion_tokens", options["max_new_tokens"])
    if "max_completion_tokens" in fields:
        fields.pop("max_tokens", None)
    return fields


def client_of(extra: dict[str, Any]) -> AsyncOpenAI:
    """Return a client of the episode's session; without one, of OPENAI_BASE_URL.

    The session's HTTP client is shared by all episodes, so nothing here closes it.
    """
    return AsyncOpenAI(
        base_url=extra.get("base_url"),
        api_key=extra.get("api_key"),
        http_client=extra.get("http_client"),
        max_retries=0,
    )


async def reward_of(reply: ChatCompletion, data: dict[str, Any]) -> float:
    """Return 1.0 for a right answer, else 0.0; in a thread, since verifying takes milliseconds."""
    text = reply.choices[0].message.content or ""
    return await asyncio.to_thread(gsm8k_reward_fn, "", text, [], [], answer=data["answer"])
