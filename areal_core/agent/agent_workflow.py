"""An agent as a workflow: it runs in its own event loop, calls the proxy, and leaves exact tokens.

    rollout thread           agents' thread                                        rollout thread
    arun_episode
      opens a session ---->  agent.run(data, base_url, ...)
      waits for the run        client call --> answer(): template, tokens ------>  engine.agenerate
                               waits        <-- renders                   <------  tokens
      rewards, rows  <-----  returns the reward

An agent that blocks (a synchronous client, `time.sleep`) stops the other agents but never the
engine, so it cannot deadlock; `areal-debug agent stress` names it. One that makes no call for
`session_timeout_seconds` is ended with an error.
"""

import asyncio
import contextlib
import gc
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from areal_core.agent.agents import load_agent, name_of
from areal_core.agent.completion import Dialogue
from areal_core.agent.episode_tree import Turn, episode_tree, without_retry_orphans
from areal_core.agent.errors import AgentStalled
from areal_core.agent.export import export_rows, rewards_by_id
from areal_core.agent.failures import classes_of, failure_of
from areal_core.agent.output_parsers import check_parsers
from areal_core.agent.proxy import AgentProxy, Preprocessor
from areal_core.agent.proxy_server import InProcessTransport, ProxyServer, write_admin_key
from areal_core.agent.sessions import Session
from areal_core.agent.transcript import encode, transcript, with_transcript
from areal_core.config import AgentConfig
from areal_core.config.import_paths import import_object
from areal_core.data.processor import VisionProcessor
from areal_core.errors import ConfigError
from areal_core.rollout.errors import PromptTooLong
from areal_core.rollout.loop_thread import UNWIND_S, FewPerTurn, LoopThread, run_on
from areal_core.rollout.types import TokenSampler
from areal_core.rollout.workflow import episode_sampling

logger = logging.getLogger(__name__)
IDLE_CHECK_S = 10.0  # period of the check for idle sessions


@dataclass(frozen=True)
class Outcome:
    """Rewards by completion id, what the model did wrong (`FAILURES`), and the exception."""

    rewards: dict[str, float]
    failure: str | None = None
    reason: str = ""


class AgentWorkflow:
    """A `RolloutWorkflow` around an agent.

    Args:
        agent: an object or a class with `async def run(self, data, **extra_kwargs)`, or its path.
            `run` gets the row, `base_url`, `api_key` and
            `http_client` (httpx), and returns a number or a dict by completion id.
        gconfig: an object with the attributes of `Sampling`: the defaults of a call.
        tokenizer: with a chat template.
        options: the `rollout.agent` section.
        agent_kwargs: for the agent's class.
        processor: of the pictures of a vision model; None for a model of text.

    Raises:
        NotAnAgent, UnsafeProxy, ConfigError: before anything starts.
    """

    def __init__(
        self,
        agent: Any,
        gconfig: Any,
        tokenizer: PreTrainedTokenizerBase,
        options: AgentConfig | None = None,
        agent_kwargs: Mapping[str, Any] | None = None,
        processor: VisionProcessor | None = None,
    ) -> None:
        self.options = options or AgentConfig()
        self.name, self.agent_kwargs = name_of(agent), agent_kwargs or {}
        self.agent: Any = None if self.options.mode == "online" else load_agent(agent, agent_kwargs)
        admin_key = self.options.admin_api_key or secrets.token_urlsafe(32)
        proxy = AgentProxy(
            build_dialogue(gconfig, tokenizer, self.options, processor),
            admin_key,
            preprocessors=build_preprocessors(self.options.message_preprocessors),
        )
        self.server = ProxyServer(proxy, self.options.host, self.options.port, self.options.max_body_bytes)
        self.key_file: Path | None = None
        if self.options.mode == "online":
            self.key_file = write_admin_key(self.server.port, admin_key)
            message = "episodes wait for POST %s/rl/start_session, with the admin key that is in %s"
            logger.info(message, self.server.base_url, self.key_file)
        self.agents = LoopThread("agents")
        self.few_per_turn = FewPerTurn()
        transport = InProcessTransport(self.server, self.few_per_turn)
        self.http_client = httpx.AsyncClient(transport=transport, timeout=None)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it logs every call
        self.reported: set[str] = set()

    async def arun_episode(self, engine: TokenSampler, data: dict[str, Any]) -> dict[str, Tensor]:
        """Run the agent once and return its rows.

        Raises as `run_in` does.
        """
        session = self.server.proxy.sessions.open(engine.agenerate, asyncio.get_running_loop())
        try:
            outcome = await self.run_in(session, data)
        finally:
            self.server.proxy.sessions.close(session)
        keep_libraries_out_of_collection()
        if outcome.failure is not None:
            self._report_once(outcome.failure, outcome.reason)
        line = transcript(
            self.name, self.agent_kwargs, data, session.in_order(), outcome.rewards, outcome.failure
        )
        return with_transcript(self.rows_of(session, outcome), encode(line))

    async def run_in(self, session: Session, data: dict[str, Any]) -> "Outcome":
        """Run the agent in an open session.

        Raises the agent's exception, or the engine's if that caused it, unless it is an outcome:
        the model failed the episode (`failures.py`), and at least one call was answered.
        """
        run = self._online if self.options.mode == "online" else self._inline
        try:
            returned = await self._unless_stalled(run(session, data), session)
        except Exception as error:
            if (failed := self._failed(session, error)) is not None:
                return failed
            if session.failure is not None:
                raise session.failure from error
            raise
        return Outcome(rewards_by_id(returned, session.in_order(), session.rewards, self.name))

    def _failed(self, session: Session, error: Exception) -> "Outcome | None":
        is_engines = session.failure is not None and not isinstance(session.failure, PromptTooLong)
        interactions = session.in_order()
        if is_engines or not interactions:
            return None
        failure = failure_of(error, interactions, session.refusals, self.options.failure_errors)
        if failure is None:
            return None
        rewards = session.rewards | {interactions[-1].id: self.options.failed_reward}
        return Outcome(rewards, failure, f"{classes_of(error)[0]}: {error}")

    def rows_of(self, session: Session, outcome: "Outcome") -> dict[str, Tensor]:
        return export_rows(
            self.tree_of(session),
            outcome.rewards,
            self.options.turn_discount,
            self.options.export_style,
            outcome.failure,
            self.server.proxy.dialogue.processor,
        )

    def tree_of(self, session: Session) -> list[Turn]:
        """Return the answered calls of a session with their place in the tree."""
        tokenizer = self.server.proxy.dialogue.tokenizer
        answered = session.in_order()
        if self.options.drop_retry_orphans:
            answered = without_retry_orphans(answered)
        return episode_tree(answered, lambda tokens: str(tokenizer.decode(tokens)))

    def _report_once(self, failure: str, reason: str) -> None:
        """Log the first failure of each kind; the statistics count the others."""
        if failure not in self.reported:
            self.reported.add(failure)
            logger.warning(
                "the model failed an episode (%s), whose reward is rollout.agent.failed_reward, %g: %s; "
                "others of this kind are counted in rollout/episode_failed/%s",
                *(failure, self.options.failed_reward, reason[:300], failure),
            )

    def close(self) -> None:
        """End runs, connections and threads. An agent that blocks its loop keeps its thread."""
        ending = self.agents.submit(self.http_client.aclose())
        with contextlib.suppress(TimeoutError):
            ending.result(UNWIND_S)
        self.agents.close(UNWIND_S)
        self.server.close()
        if self.key_file is not None:
            self.key_file.unlink(missing_ok=True)

    async def _inline(self, session: Session, data: dict[str, Any]) -> Any:
        run = self.agent.run(
            dict(data), base_url=self.server.base_url, api_key=session.key, http_client=self.http_client
        )
        return await run_on(self.agents.loop, self._begin(run))

    async def _begin(self, run: Coroutine[Any, Any, Any]) -> Any:
        try:
            await self.few_per_turn.wait()
        except asyncio.CancelledError:
            run.close()
            raise
        return await run

    async def _online(self, session: Session, data: dict[str, Any]) -> None:
        """Offer the session to clients of `/rl/start_session`, and wait until `/rl/end_session`."""
        offers = self.server.proxy.offers
        session.last_used = math.inf  # a session that nobody has started is not idle
        offers.append((session, data))
        try:
            await session.ended.wait()
            late_until = time.monotonic() + self.options.set_reward_finish_timeout
            while not session.rewards and time.monotonic() < late_until:
                await asyncio.sleep(0.05)
        finally:
            if (session, data) in offers:
                offers.remove((session, data))

    async def _unless_stalled(self, run: Awaitable[Any], session: Session) -> Any:
        """Return the result of the run.

        Raises AgentStalled when the session has been idle for too long.
        """
        limit_s = self.options.session_timeout_seconds
        task = asyncio.ensure_future(run)
        try:
            while not task.done():
                left_s = session.last_used + limit_s - time.monotonic()
                if left_s <= 0 and session.num_running == 0:
                    raise AgentStalled(
                        f"{self.name} has made no call for {limit_s} s (rollout.agent.session_timeout_seconds) after "
                        f"{len(session.interactions)} answered calls, and has not returned"
                    )
                await asyncio.wait({task}, timeout=min(max(left_s, 0.1), IDLE_CHECK_S))
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@cache
def keep_libraries_out_of_collection() -> None:
    """Exclude the objects of libraries from garbage collection, once, after the first run.

    The half million objects of torch, Transformers and openai are never freed. Traversed by every
    full collection, with the objects of 2,048 episodes, they stop all threads for a second each
    time (measured p99 of the event-loop lag: 0.9 s, 0.1 s without them).
    """
    gc.freeze()


def build_preprocessors(paths: Sequence[str]) -> list[Preprocessor]:
    """Return an object of each class. Raises ConfigError."""
    what = "rollout.agent.message_preprocessors"
    built = [import_object(path, what) for path in paths]
    for path, found in zip(paths, built, strict=True):
        if not isinstance(found, type) or not any("__call__" in vars(cls) for cls in found.__mro__):
            raise ConfigError(f"{what} {path!r} is not a class whose objects are called with messages")
    return [found() for found in built]


def build_dialogue(
    gconfig: Any,
    tokenizer: PreTrainedTokenizerBase,
    options: AgentConfig,
    processor: VisionProcessor | None = None,
) -> Dialogue:
    """Return the conversion of messages to tokens and back.

    No model can read an image token without a picture, so it is a stop token.

    Raises ConfigError for an unknown parser.
    """
    check_parsers(options.tool_call_parser, options.reasoning_parser)
    ends = () if processor is None else (processor.image_token_id,)
    max_tokens = options.engine_max_tokens or gconfig.max_tokens
    sampling = episode_sampling(gconfig, tokenizer, *ends, max_tokens=max_tokens)
    return Dialogue(
        tokenizer=tokenizer,
        sampling=sampling,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        chat_template_type=options.chat_template_type,
        processor=processor,
        remote_images=options.remote_images,
    )
