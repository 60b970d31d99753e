"""Sessions: one per episode, each with a secret key that opens only this session.

A session has the sampling function of its episode and its event loop, and keeps the answered calls.
"""

import asyncio
import secrets
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from areal_core.agent.conversation import Interaction
from areal_core.agent.errors import BadRequest
from areal_core.rollout.errors import PromptTooLong
from areal_core.rollout.loop_thread import run_on
from areal_core.rollout.types import ModelRequest, ModelResponse

Sample = Callable[[ModelRequest], Coroutine[Any, Any, ModelResponse]]


@dataclass
class Session:
    """The answered calls of one agent run, and the rewards that it has set."""

    sample: Sample
    loop: asyncio.AbstractEventLoop  # on which `sample` is called
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    key: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(32)}")
    interactions: list[Interaction] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)  # by the id of the interaction
    failure: Exception | None = None  # of the last call; the agent saw only an HTTP status
    refusals: list[str] = field(default_factory=list)  # of prompts that were too long
    num_calls: int = 0
    num_running: int = 0
    last_used: float = field(default_factory=time.monotonic)
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # set on `loop`

    async def generate(self, request: ModelRequest) -> ModelResponse:
        """Sample on the engine's own event loop; callable from any loop."""
        self.num_running += 1
        try:
            response = await run_on(self.loop, self.sample(request))
            self.failure = None  # the agent has recovered from an earlier one
            return response
        except Exception as error:
            self.failure = error
            if isinstance(error, PromptTooLong):
                self.refusals.append(str(error))
            raise
        finally:
            self.num_running -= 1
            self.last_used = time.monotonic()

    def in_order(self) -> list[Interaction]:
        """Return the answered calls in the order of their requests."""
        return sorted(self.interactions, key=lambda interaction: interaction.turn)

    def set_reward(self, reward: float, interaction_id: str | None) -> None:
        """Set the reward of an interaction of this session, by default the last.

        Raises BadRequest.
        """
        if not self.interactions:
            raise BadRequest("this session has no completion to reward", 409)
        known = [interaction.id for interaction in self.in_order()]
        if interaction_id is not None and interaction_id not in known:
            raise BadRequest(f"{interaction_id!r} is not a completion of this session", 404, "not_found")
        self.rewards[interaction_id or known[-1]] = reward


class Sessions:
    """The open sessions, by key. They are opened and closed from any thread."""

    def __init__(self) -> None:
        self._by_key: dict[str, Session] = {}

    def open(self, sample: Sample, loop: asyncio.AbstractEventLoop) -> Session:
        """Open a session; `sample` is an engine's `agenerate`, and `loop` its event loop."""
        session = Session(sample, loop)
        self._by_key[session.key] = session
        return session

    def with_key(self, key: str) -> Session:
        """Return the session of a key. Raises BadRequest, with 401, for an unknown key."""
        if key not in self._by_key:
            raise BadRequest(
                "the session key is wrong, or its session has ended: use the api_key argument of the run",
                401,
                "authentication_error",
            )
        return self._by_key[key]

    def with_id(self, session_id: str) -> Session:
        """Return the session of an id. Raises BadRequest, with 404, for an unknown id."""
        for session in list(self._by_key.values()):
            if session.id == session_id:
                return session
        raise BadRequest(f"no session {session_id!r} is open", 404, "not_found")

    def close(self, session: Session) -> None:
        """Close a session: its key is invalid from now on."""
        self._by_key.pop(session.key, None)


def facts_of(session: Session) -> list[dict[str, Any]]:
    """Return a session's interactions as JSON types: messages, tokens, logprobs, versions."""
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
