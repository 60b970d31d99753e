"""Requests and replies of the proxy, over a socket or in this process (both in `proxy_server.py`).

    agent --(OpenAI or Anthropic client)--> answer() --> dialect.parse_call --> complete() --> the
    session's engine
                                               ^                                                    | tokens, logprobs, versions
                                               +---------- dialect.render_reply <--- Interaction <--+ kept in the session

A session key opens its own session. The admin key is for the owner of the run: it starts the
sessions that episodes offer (mode "online") and reads sessions.
"""

import hmac
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import PreTrainedTokenizerBase

from areal_core.agent.apis import anthropic_messages, openai_chat, openai_completions, openai_responses
from areal_core.agent.apis.image_parts import fetched
from areal_core.agent.apis.json_fields import parse_object, take
from areal_core.agent.completion import Dialogue, complete
from areal_core.agent.conversation import Call, Interaction
from areal_core.agent.errors import BadRequest
from areal_core.agent.sessions import Session, Sessions, facts_of
from areal_core.data.images import data_url

# Messages as OpenAI's chat API has them, to such messages; may change what it gets.
Preprocessor = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reply:
    """An HTTP reply."""

    status: int
    body: bytes
    content_type: str = "application/json"


@dataclass(frozen=True)
class Dialect:
    """The form of calls, replies and errors in one API."""

    id_prefix: str
    parse_call: Callable[[dict[str, Any], Sequence[Interaction]], Call]
    render_reply: Callable[[Sequence[Interaction], PreTrainedTokenizerBase], dict[str, Any]]
    render_stream: Callable[[Sequence[Interaction], PreTrainedTokenizerBase], Iterator[bytes]]
    render_error: Callable[[int, str, str], dict[str, Any]]


def dialect_of(api: ModuleType, errors: ModuleType = openai_chat) -> Dialect:
    """Return the dialect of a module of `apis/`, whose errors have the form of another one."""
    return Dialect(api.ID_PREFIX, api.parse_call, api.render_reply, api.render_stream, errors.render_error)


CHAT, COMPLETIONS, RESPONSES = map(dialect_of, (openai_chat, openai_completions, openai_responses))
MESSAGES = dialect_of(anthropic_messages, anthropic_messages)
DIALECTS = {
    "/chat/completions": CHAT,
    "/completions": COMPLETIONS,
    "/responses": RESPONSES,
    "/messages": MESSAGES,
}
# Count the tokens of the prompt of a request, without a completion.
COUNTED = {"/messages/count_tokens": MESSAGES, "/responses/input_tokens": RESPONSES}
CHANGES = ("/rl/start_session", "/rl/set_reward", "/rl/end_session", "/export_trajectories")


@dataclass
class AgentProxy:
    """The routes of one proxy; `offers` are sessions that wait for an external client."""

    dialogue: Dialogue
    admin_key: str
    sessions: Sessions = field(default_factory=Sessions)
    offers: deque[tuple[Session, dict[str, Any]]] = field(default_factory=deque)
    preprocessors: Sequence[Preprocessor] = ()  # of the messages of Anthropic's API

    async def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """Return the reply to one request.

        An error of the client is reported in the form of its API.
        """
        path = path.removeprefix("/v1")
        dialect = DIALECTS.get(path) or COUNTED.get(path) or CHAT
        try:
            if path in DIALECTS and method == "POST":
                return await self._call(dialect, key_of(headers), body)
            if path in COUNTED and method == "POST":
                return json_reply(await self._count(dialect, key_of(headers), body))
            return json_reply(self._administer(method, path, key_of(headers), body))
        except BadRequest as error:
            refusal = dialect.render_error(error.status, error.code, str(error))
            return json_reply(refusal, error.status)
        except Exception as error:  # the boundary of a server: its thread must continue
            logger.debug("a call of the model failed", exc_info=True)
            reason = f"the model could not be called: {type(error).__name__}: {error}"
            return json_reply(dialect.render_error(500, "engine_error", reason), 500)

    async def _call(self, dialect: Dialect, key: str, body: bytes) -> Reply:
        session = self.sessions.with_key(key)
        call = await self._parsed(dialect, session, body)
        try:
            interactions = await complete(session, call, self.dialogue, dialect.id_prefix)
        except BadRequest:
            raise
        except Exception as error:  # the boundary: the episode raises the error
            session.failure = error
            raise
        if call.stream:
            events = b"".join(dialect.render_stream(interactions, self.dialogue.tokenizer))
            return Reply(200, events, "text/event-stream")
        return json_reply(dialect.render_reply(interactions, self.dialogue.tokenizer))

    async def _parsed(self, dialect: Dialect, session: Session, body: bytes) -> Call:
        call = dialect.parse_call(parse_object(body), session.in_order())
        if dialect is MESSAGES and self.preprocessors:
            shown = [openai_chat.message_json(message) for message in call.messages]
            for preprocess in self.preprocessors:
                shown = preprocess(shown)
            call = replace(call, messages=tuple(map(openai_chat.parse_message, shown)))
        return await fetched(call, self.dialogue.remote_images)

    async def _count(self, dialect: Dialect, key: str, body: bytes) -> dict[str, Any]:
        session = self.sessions.with_key(key)
        tokens = self.dialogue.prompt_of(await self._parsed(dialect, session, body), session)
        return {"object": "response.input_tokens", "input_tokens": len(tokens)}

    def _administer(self, method: str, path: str, key: str, body: bytes) -> dict[str, Any]:
        match method, path:
            case "GET", "/health":
                return {"status": "ok"}
            case "GET", "/models":
                self.sessions.with_key(key)
                return models_json(Path(self.dialogue.tokenizer.name_or_path).name or "policy")
            case "GET", _ if path.startswith("/models/"):
                self.sessions.with_key(key)
                return models_json(path.removeprefix("/models/"))["data"][0]
            case "POST", "/rl/start_session":
                self._require_admin(key)
                return self._start_offered()
            case "POST", "/rl/set_reward":
                return self._set_reward(self.sessions.with_key(key), parse_object(body))
            case "POST", "/rl/end_session":
                session = self.sessions.with_key(key)
                session.loop.call_soon_threadsafe(session.ended.set)
                return {"session_id": session.id, "num_interactions": len(session.interactions)}
            case "POST", "/export_trajectories":
                self._require_admin(key)
                session = self.sessions.with_id(take(parse_object(body), "session_id", str))
                return {"session_id": session.id, "interactions": facts_of(session)}
        if method != "POST" and path in (*DIALECTS, *COUNTED, *CHANGES):
            raise BadRequest(f"{path} answers POST and not {method}", 405, "method_not_allowed")
        raise BadRequest(f"there is no route {method} {path}", 404, "not_found")

    def _start_offered(self) -> dict[str, Any]:
        if not self.offers:
            raise BadRequest("no episode waits for a session now; try again later", 429, "no_capacity")
        session, data = self.offers.popleft()
        session.last_used = time.monotonic()
        return {"session_id": session.id, "api_key": session.key, "data": data}

    def _set_reward(self, session: Session, fields: dict[str, Any]) -> dict[str, Any]:
        reward = take(fields, "reward", float)
        if not math.isfinite(reward):
            raise BadRequest(f"reward is {reward}; expected a finite number")
        session.set_reward(float(reward), take(fields, "interaction_id", str, None))
        return {"session_id": session.id, "rewards": session.rewards}

    def _require_admin(self, key: str) -> None:
        if not hmac.compare_digest(key.encode(errors="replace"), self.admin_key.encode()):
            raise BadRequest(
                "the admin key is wrong: it is rollout.agent.admin_api_key", 401, "authentication_error"
            )


def models_json(name: str) -> dict[str, Any]:
    """Return the list of the one model, with the fields of OpenAI's and Anthropic's APIs.

    A request may name any model: the policy answers.
    """
    model = {"id": name, "object": "model", "created": 0, "owned_by": "policy"}
    anthropic = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    ends = {"first_id": name, "last_id": name, "has_more": False}
    return {"object": "list", "data": [model | anthropic], **ends}


def key_of(headers: Mapping[str, str]) -> str:
    bearer = headers.get("authorization", "").removeprefix("Bearer ").strip()
    return headers.get("x-api-key", "") or bearer


def json_reply(facts: dict[str, Any], status: int = 200) -> Reply:
    # A path or header that is not UTF-8 has lone surrogates, and an error quotes it.
    text = json.dumps(facts, ensure_ascii=False, default=picture_url)
    return Reply(status, text.encode(errors="replace"))


def picture_url(value: Any) -> str:
    if isinstance(value, bytes):
        return data_url(value)
    raise TypeError(f"a row has a {type(value).__name__}; a client can get JSON and pictures only")
