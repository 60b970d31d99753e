"""Agents given to the trainer by class, object or path; cancellation of an episode."""

import asyncio

import pytest

from areal_core.agent.agent_workflow import AgentWorkflow
from areal_core.config import AgentConfig, GenerationHyperparameters
from areal_core.errors import ConfigError
from areal_core.trainer.build_rollouts import build_workflow
from tests.agent.agents_under_test import client_of


class Sized:
    def __init__(self, size: int = 1) -> None:
        self.size = size

    async def run(self, data, **extra): ...


@pytest.mark.parametrize("agent", [Sized, f"{__file__}:Sized", Sized(3)])
def test_an_agent_becomes_a_workflow_that_is_closed_with_the_run(agent, tokenizer):
    closing = []
    evaluation = GenerationHyperparameters(max_new_tokens=7)
    arguments = {"gconfig": evaluation} | ({} if isinstance(agent, Sized) else {"size": 3})
    options = AgentConfig(turn_discount=0.5)
    training = GenerationHyperparameters(max_new_tokens=99)
    built = build_workflow(agent, arguments, training, tokenizer, closing.append, agent_options=options)
    try:
        assert isinstance(built, AgentWorkflow)
        assert built.agent.size == 3
        assert built.server.proxy.dialogue.sampling.max_new_tokens == 7
        assert built.options.turn_discount == 0.5
        assert closing == [built.close]
    finally:
        built.close()
    assert built.agents.loop.is_closed()
    assert built.server.thread.loop.is_closed()


def test_what_neither_runs_nor_runs_episodes_is_refused_with_both_forms(tokenizer):
    with pytest.raises(
        ConfigError, match=r"has no method arun_episode\(engine, data\).* or an agent with async def run"
    ):
        build_workflow(object(), {}, GenerationHyperparameters(), tokenizer, lambda close: None)


class Patient:
    """Request one completion, and note when the agent has ended."""

    ended = False

    async def run(self, data, **extra):
        client = client_of(extra)
        try:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
        finally:
            self.ended = True


class Silent:
    """An engine that never answers."""

    def __init__(self) -> None:
        self.requested, self.cancelled = asyncio.Event(), False

    async def agenerate(self, req):
        self.requested.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled = True


def test_cancelling_an_episode_ends_agent_and_request_before_it_returns(make_workflow):
    workflow, engine = make_workflow(Patient), Silent()

    async def cancel_in_the_middle():
        episode = asyncio.ensure_future(workflow.arun_episode(engine, {}))
        await engine.requested.wait()
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        return engine.cancelled, workflow.agent.ended

    assert asyncio.run(cancel_in_the_middle()) == (True, True)
