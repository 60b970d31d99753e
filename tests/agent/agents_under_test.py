"""Agents for the tests of `agent run` and `agent stress`, one behaviour each."""

import asyncio
import time

import openai
import torch

from areal_core.rollout.types import ModelRequest, sampling_from
from areal_core.rollout.workflow import episode_tensors, prompt_tokens


def client_of(extra) -> openai.AsyncOpenAI:
    """Return the client of the run's own connection."""
    given = {name: extra[name] for name in ("base_url", "api_key", "http_client")}
    return openai.AsyncOpenAI(max_retries=0, **given)


class Plain:
    """Request `num_turns` completions; the reward is the length of the last answer."""

    def __init__(self, num_turns: int = 1) -> None:
        self.num_turns = num_turns

    async def run(self, data, **extra):
        client = client_of(extra)
        messages = list(data["messages"])
        for _ in range(self.num_turns):
            reply = await client.chat.completions.create(model="m", messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": "and?"}]
        return len(reply.choices[0].message.content or "")


class Blocking(Plain):
    """Call something synchronous inside a coroutine, a common defect of agent frameworks."""

    async def run(self, data, **extra):
        reward = await super().run(data, **extra)
        self.look_it_up()
        return reward

    def look_it_up(self) -> None:
        time.sleep(0.06)


class Words(Plain):
    async def run(self, data, **extra):
        await super().run(data, **extra)
        await asyncio.sleep(0)
        return "very good"


class NotAsync:
    def run(self, data, **extra): ...


class Turns:
    """A workflow of one row: `num_turns` completions that continue each other's tokens."""

    def __init__(self, gconfig, tokenizer, num_turns=2) -> None:
        self.sampling = sampling_from(gconfig, n_samples=1)
        self.tokenizer, self.num_turns = tokenizer, num_turns

    async def arun_episode(self, engine, data):
        ids = prompt_tokens(self.tokenizer, data["messages"], {})
        for _ in range(self.num_turns):
            response = await engine.agenerate(ModelRequest(input_ids=ids, sampling=self.sampling))
            ids = response.input_tokens + response.output_tokens
        return self.rows(response)

    def rows(self, response):
        return episode_tensors(response, float(len(response.output_tokens)))


class TokenisedAgain(Turns):
    """Return other tokens than those that were sampled."""

    def rows(self, response):
        rows = super().rows(response)
        rows["input_ids"] = rows["input_ids"].flip(1)
        return rows


class WrongDtype(Turns):
    def rows(self, response):
        return super().rows(response) | {"rewards": torch.tensor([1])}


class Branching:
    """Continue one answer in two ways, then from a summary, and give up."""

    async def run(self, data, **extra):
        from areal_core.agent import EpisodeFailed

        client = client_of(extra)
        start = [{"role": "system", "content": "s"}, *data["messages"]]

        async def ask(*messages):
            reply = await client.chat.completions.create(model="m", messages=list(messages))
            return reply.choices[0].message

        first = await ask(*start)
        other = {"role": "user", "content": "another"}
        second = await ask(*start, first, {"role": "user", "content": "and?"})
        await ask(*start, first, other)
        await ask(*start, first, {"role": "user", "content": "and?"}, second, other)
        await ask(start[0], {"role": "user", "content": "so far: nothing"})
        raise EpisodeFailed("no answer after five calls")
