"""Agents given to the trainer by class, object or path; cancellation of an episode."""

import asyncio

import pytest

from tests.agent.agents_under_test import client_of


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
