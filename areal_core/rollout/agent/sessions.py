"""Sessions: one an episode, each with a secret key that opens this session and no other.

A session knows how its episode samples and on which event loop, and keeps what was sampled through it.
"""

import asyncio
import secrets
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from areal_core.rollout.agent.conversation import Interaction
from areal_core.rollout.agent.errors import BadRequest
from areal_core.rollout.loop_thread import run_on
from areal_core.rollout.types import ModelRequest, ModelResponse

Sample = Callable[[ModelRequest], Coroutine[Any, Any, ModelResponse]]


@dataclass
class Session:
    """What one agent run has asked so far, and the rewards that it has set."""

    sample: Sample
    loop: asyncio.AbstractEventLoop  # on which `sample` is called
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    key: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(32)}")
    interactions: list[Interaction] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)  # by the id of the interaction
    failure: Exception | None = None  # of the last call, if it failed: the agent saw only an HTTP status
    num_calls: int = 0
    num_running: int = 0
    last_used: float = field(default_factory=time.monotonic)
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # set on `loop`

    async def generate(self, request: ModelRequest) -> ModelResponse:
        """Samples on the engine's own loop, from any loop."""
        self.num_running += 1
        try:
            response = await run_on(self.loop, self.sample(request))
            self.failure = None  # the agent has come over an earlier one
            return response
        except Exception as error:
            self.failure = error
            raise
        finally:
            self.num_running -= 1
            self.last_used = time.monotonic()

    def in_order(self) -> list[Interaction]:
        """The answered calls in the order in which they were asked."""
        return sorted(self.interactions, key=lambda interaction: interaction.turn)

    def set_reward(self, reward: float, interaction_id: str | None) -> None:
        """Rewards one interaction of this session, the last one by default. Raises BadRequest."""
        if not self.interactions:
            raise BadRequest("this session has no completion that a reward could be given to", 409)
        known = [interaction.id for interaction in self.in_order()]
        if interaction_id is not None and interaction_id not in known:
            raise BadRequest(f"{interaction_id!r} is no completion of this session", 404, "not_found")
        self.rewards[interaction_id or known[-1]] = reward


class Sessions:
    """The sessions that are open, by key. Opened and closed from any thread."""

    def __init__(self) -> None:
        self._by_key: dict[str, Session] = {}

    def open(self, sample: Sample, loop: asyncio.AbstractEventLoop) -> Session:
        """A new session; `sample` is an engine's `agenerate`, and `loop` where that engine lives."""
        session = Session(sample, loop)
        self._by_key[session.key] = session
        return session

    def with_key(self, key: str) -> Session:
        """The session of a key. Raises BadRequest, with 401, for a key of none."""
        if key not in self._by_key:
            raise BadRequest(
                "the session key is wrong, or its session has ended: use the api_key that the run was given",
                401,
                "authentication_error",
            )
        return self._by_key[key]

    def with_id(self, session_id: str) -> Session:
        """The session of an id. Raises BadRequest, with 404."""
        for session in list(self._by_key.values()):
            if session.id == session_id:
                return session
        raise BadRequest(f"no session {session_id!r} is open", 404, "not_found")

    def close(self, session: Session) -> None:
        """From now on its key opens nothing."""
        self._by_key.pop(session.key, None)


def facts_of(session: Session) -> list[dict[str, Any]]:
    """A session's interactions as JSON types: what was said, and the tokens with their logprobs and versions."""
    return [
        {
            "id": interaction.id,
            "messages": [message.for_template() for message in interaction.call.messages],
            "message": interaction.message.for_template(),
            "input_tokens": interaction.response.input_tokens,
            "output_tokens": interaction.response.output_tokens,
            "output_logprobs": interaction.response.output_logprobs,
            "output_versions": interaction.response.output_versions,
            "stop_reason": interaction.response.stop_reason,
            "reward": session.rewards.get(interaction.id, None),
        }
        for interaction in session.in_order()
    ]
