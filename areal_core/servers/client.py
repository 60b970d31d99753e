"""Sample tokens from inference servers over HTTP, through weight updates and faulty servers.

    agenerate (event loop)                                      what can happen to it
    ---------------------------------------------------------   ---------------------------------------------------
    a server from the router <---- waits for one (may_come) --- none serves
    POST, prompt + tokens so far                                pause "abort": the reply holds the tokens so far
      ... the server holds it while it is paused ...            pause "retract", "in_place": a later, complete reply
    reply: tokens, logprobs, and the version of each token      the server dies or hangs: sent again, to another one
    checked (`reply.py`)                                        it breaks a rule: server in quarantine, sent again
    aborted? again, with the longer prompt                      the server restarted with old weights: discarded

`set_version` (trainer's thread) and one task per server (`_watch`, while requests run) query the
weight versions. `health.py` has the state of each server: only those that serve, with the current
weights, get requests (`router.py`).

Each token has the version that the *server* reports, so a reply that spans a weight update has the
right versions. Where adapters are served (`lora_name`) a request names the adapter of one version,
which is then the version of its tokens; after an abort it is the server's current one.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import aiohttp
import numpy as np

from areal_core.data.routed_experts import RoutingSizes
from areal_core.rollout.errors import MalformedReply, RequestRefused, ServerDied
from areal_core.rollout.loop_thread import FewPerTurn
from areal_core.rollout.types import ModelRequest, ModelResponse, seed_of
from areal_core.servers.connections import Connections, is_own_error
from areal_core.servers.discovery import Discovery
from areal_core.servers.health import Health, ServerRecord, State
from areal_core.servers.identity import RunModel
from areal_core.servers.pool import ServerPool
from areal_core.servers.reply import Asked, Chunk, Scored, checked, parse_version
from areal_core.servers.router import Router
from areal_core.servers.server import Server
from areal_core.servers.wire import ASK_TIMEOUT_S, Wire, ask_version, rejection_reason

POLL_S = 0.5  # between two searches for a server
MAX_FAILURES = 100  # of one request: a server that always breaks it off is not retried indefinitely
MAX_THREADS = 32  # that query servers
MAX_TRIALS = 3  # of quarantined servers, after which a request does not wait for them any more
OUR_FAULT = {400, 413, 422}  # statuses that may be the fault of the request
TOO_MANY_REQUESTS = 429
TRIAL_TOKENS = 8
MAX_SCORINGS = 8  # of one request, each after another weight update or a lost server
logger = logging.getLogger(__name__)


def adapter_name(name: str, version: int | str) -> str:
    return f"{name}-v{version}"


class FleetClient:
    """An `InferenceEngine` over one or more servers that hold the same weights.

    Args:
        servers: the initial servers, with the weights of `version`.
        wire: the servers' routes.
        timeout_s: maximum seconds for one completion.
        num_retries: further attempts on a server that breaks a request off or answers 5xx.
        retry_delay_s: seconds before a request is sent to the same server again.
        version: version of the weights that servers have before the first weight update.
        discovery: finds further servers; by default the set is fixed.
        model: the model that a new server must serve; None accepts any.
        server_wait_s: maximum seconds to wait for a server when none serves and one may.
        health_interval_s: seconds between two queries of a server that has not replied since.
        health_timeout_s: seconds in which such a query is answered.
        pause_mode: see `ServerPool`.
        lora_name: name of the adapters without their version; None if weight updates send all
            weights.
        knows_versions: only this run updates the servers, one version after the other, so a
            reply of a later version than the next one is wrong.
        sizes: of the experts, which are asked for each token; None asks for none.
        connect: makes the connections, from `timeout_s`.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        wire: Wire,
        *,
        timeout_s: float = 3600.0,
        num_retries: int = 3,
        retry_delay_s: float = 1.0,
        version: int = 0,
        discovery: Discovery | None = None,
        model: RunModel | None = None,
        server_wait_s: float = 300.0,
        health_interval_s: float = 2.0,
        health_timeout_s: float = ASK_TIMEOUT_S,
        pause_mode: str = "abort",
        lora_name: str | None = None,
        knows_versions: bool = False,
        sizes: RoutingSizes | None = None,
        seed: int | None = None,
        connect: Callable[[float], Connections] = Connections,
    ) -> None:
        self.version = version
        self.is_paused = False
        self.router = Router(servers)
        self.health = Health(servers)
        self._wire = wire
        self._first_version = version
        self._discovery = discovery or Discovery(tuple(servers))
        self._model = model
        self._approved = set(servers)
        self._refreshing = threading.Lock()
        self._pool = ServerPool(servers, wire, pause_mode=pause_mode)
        self._timeout_s = timeout_s
        self._num_retries = num_retries
        self._retry_delay_s = retry_delay_s
        self._server_wait_s = server_wait_s
        self._health_interval_s = health_interval_s
        self._health_timeout_s = health_timeout_s
        self._knows_versions = knows_versions
        self._lora_name = lora_name
        self._sizes, self._seed = sizes, seed
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="query-servers")
        self._searching = asyncio.Lock()
        self._connect = connect
        self._connections: Connections | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns = FewPerTurn()
        self._num_running = 0
        self._attempts = itertools.count()
        self._is_closed = False
        self._is_at_limit = False  # of file descriptors or ports
        self._watchers: dict[Server, asyncio.Task[None]] = {}
        self._trial: ModelRequest | None = None  # the last request
        self._last_failure = "none was given"

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Sample one completion, in several requests if it is aborted or a server fails.

        For `model_logprobs` the same server scores the sampled tokens, since the log-probs of a
        reply are those after grammar, penalties and temperature.

        Raises:
            PromptTooLong: no space is left for a new token.
            RequestRefused: servers refuse this request, or answered 5xx too often.
            ServerDied: no server is left, and none joined or recovered in time.
        """
        for _ in range(MAX_SCORINGS):
            response, server = await self._sample(req)
            if not req.sampling.model_logprobs:
                return response
            scored = await self._scored(req, response, server)
            if scored is not None:
                return scored
        raise ServerDied(f"a completion could not be scored {MAX_SCORINGS} times: {self._last_failure}")

    async def _scored(
        self, req: ModelRequest, response: ModelResponse, server: Server
    ) -> ModelResponse | None:
        """Return the response with the log-probs of the model; None if it must be sampled again.

        Raises RequestRefused if servers cannot score.
        """
        version, tokens = response.output_versions[-1], response.output_tokens
        self._begin_request()
        try:
            scored = await self._score(server, req, tokens, version)
            held = scored.version
            chunk = Chunk(tokens, scored.logprobs, [held] * len(tokens), "stop", "")
            logprobs = checked(chunk, Asked("", len(tokens), None, None)).logprobs
        except (aiohttp.ClientError, TimeoutError) as error:
            self._last_failure = f"{type(error).__name__} ({error}) from server {server.describe()}"
            return None
        except MalformedReply as error:
            self._reject(server, error.rule, str(error))
            return None
        finally:
            self._num_running -= 1
        if any(sampled != held for sampled in response.output_versions):
            self._last_failure = "a weight update came before"
            return None
        return replace(response, output_logprobs=logprobs)

    async def _sample(self, req: ModelRequest) -> tuple[ModelResponse, Server]:
        budget = req.num_new_tokens()
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        experts: list[np.ndarray] = []
        finish = ""
        self._begin_request()
        try:
            while finish in ("", "abort") and len(tokens) < budget:
                server, chunk = await self._generate(req, tokens, budget - len(tokens), finish == "abort")
                finish = chunk.finish
                if finish == "abort" and req.sampling.model_logprobs:
                    # A grammar cannot continue from the middle, and new weights would score these.
                    continue
                if self._sizes is not None:
                    if chunk.experts is None:  # aborted in the queue: sampled again, with experts
                        continue
                    experts.append(chunk.experts)
                tokens += chunk.tokens
                logprobs += chunk.logprobs
                versions += [self._first_version if v is None else v for v in chunk.versions]
        finally:
            self._num_running -= 1
        response = ModelResponse(
            input_tokens=req.input_ids,
            output_tokens=tokens,
            output_logprobs=logprobs,
            output_versions=versions,
            stop_reason="length" if finish == "abort" else finish,
            routed_experts=np.concatenate(experts) if experts else None,
        )
        return response, server

    async def _score(self, server: Server, req: ModelRequest, tokens: list[int], version: int) -> Scored:
        """Return a server's log-probs of tokens after a request's prompt, and its version.

        Args:
            version: of the adapter, where adapters are served; then also the returned one.
        """
        assert self._connections is not None
        rid = f"score-{next(self._attempts)}"
        payload = self._wire.score_payload(req.input_ids + tokens, len(req.input_ids), rid)
        if req.images:
            payload = self._wire.with_images(payload, req)
        body = await self._connections.post(
            server, self._wire.routes.generate, payload | self._adapter(version)
        )
        scored = self._wire.parse_score(body, tokens)
        held = self._first_version if scored.version is None else scored.version
        return replace(scored, version=version if self._lora_name else held)

    def set_version(self, version: int) -> None:
        """Set the current version of the weights, and use only servers that hold it from now on."""
        self.version = version
        self.refresh()

    def pause(self) -> None:
        """Pause generation on the servers in use."""
        self.is_paused = True
        self._pool.servers = list(self.router.servers)
        self._pool.pause()

    def resume(self) -> None:
        """Continue generation."""
        self._pool.resume()
        self.is_paused = False

    def refresh(self) -> None:
        """Query the weight version of every known server, and select the usable ones.

        Callable from any thread; blocks until the slowest answer, at most some seconds.
        """
        with self._refreshing:
            # Read before the servers are queried: a weight update may end before an answer arrives.
            current = self.version
            known = self._discovery.servers()
            self.health.keep(known)
            # A hung server is queried by its task: nothing waits for it here.
            asked = [server for server in known if self.health.record(server).state is not State.HUNG]
            versions = self._threads.map(self._ask_version, asked)
            for server, version in zip(asked, versions, strict=True):
                self._note(server, version, current)
        self._select()

    def _ask_version(self, server: Server) -> str | None:
        return ask_version(server, self._wire, self._health_timeout_s)

    def _note(self, server: Server, version: str | None, current: int) -> None:
        """Take the answer of a server to a query of its weight version; None is no answer."""
        if version is None:
            self.health.missed(server, f"the last for {self._health_timeout_s:g} s")
        elif self.health.answered(server, version, current, self._first_version) and self._is_approved(
            server
        ):
            self.health.approved(server)

    def _is_approved(self, server: Server) -> bool:
        """Return whether a server serves the run's model; it is queried once."""
        if server not in self._approved and not rejection_reason(server, self._wire, self._model):
            self._approved.add(server)
        return server in self._approved

    def _select(self) -> None:
        self.router.servers = self.health.serving()

    def close(self) -> None:
        """Close from outside the event loop, while it runs; inside, await `aclose`."""
        if self._loop is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self.aclose(), self._loop).result()
        self._pool.close()
        self._threads.shutdown()

    async def aclose(self) -> None:
        """End running requests with `ServerDied`."""
        self._is_closed = True
        for watcher in self._watchers.values():
            watcher.cancel()
        if self._connections is not None:
            await self._connections.close()

    async def _generate(
        self, req: ModelRequest, sampled: list[int], budget: int, was_cut: bool
    ) -> tuple[Server, Chunk]:
        """Request one chunk from a server with the current weights; return both."""
        prompt = req.metadata.get("prompt_id", req.rid)
        failed: Counter[Server] = Counter()
        refused: dict[Server, RequestRefused] = {}
        avoid, needs_version, num_slow = None, was_cut, 0
        while not self._is_closed:
            server = await self._choose(prompt, avoid, refused)
            if server == avoid:
                await asyncio.sleep(self._retry_delay_s)
            version = self.version
            if self._lora_name and needs_version:  # an update reaches servers before this client
                version = max(version, await self._version_on(server))
            started = time.monotonic()
            try:
                chunk = await self._ask(server, req, sampled, budget, version)
            except (aiohttp.ClientError, TimeoutError) as error:
                if is_own_error(error):
                    await self._wait_for_descriptor(error)
                    continue
                avoid = server
                failed[server] += 1
                await self._note_failure(server, error, failed[server])
                num_slow += time.monotonic() - started >= self._timeout_s
                if num_slow > self._num_retries:
                    raise ServerDied(
                        f"no reply within {self._timeout_s:g} s (rollout.request_timeout), {num_slow} times"
                    ) from error
            except RequestRefused as error:
                avoid, needs_version = server, True
                failed[server] += 1
                if await self._lacks(version, server):
                    pass
                elif error.status in OUR_FAULT:
                    refused[server] = error
                else:
                    self._note_refusal(server, error, failed)
            except MalformedReply as error:
                avoid = server
                failed[server] += 1
                self._reject(server, error.rule, str(error))
            else:
                is_first = version == self._first_version
                if is_first or all(v is not None and v >= version for v in chunk.versions):
                    for other, refusal in refused.items():
                        self._reject(other, f"http_{refusal.status}", str(refusal))
                    return server, chunk
                self.health.change(server, State.STALE, f"restarted without the weights of version {version}")
                self._select()
            if failed.total() > MAX_FAILURES:
                raise ServerDied(f"a request failed {MAX_FAILURES} times: {self._last_failure}")
        raise ServerDied("the client was closed while this request ran")

    async def _choose(
        self, prompt: Hashable, avoid: Server | None, refused: Mapping[Server, RequestRefused]
    ) -> Server:
        """Return a server for a request that some servers have `refused`, as if it was malformed.

        It is malformed if all say so: the refusal of the last one is raised. A server that is in
        quarantine or asks for a delay is waited for.
        """
        if not refused:
            return self.router.choose(prompt, avoid) or await self._wait_for_server()
        while any(r.server not in refused and may_answer(r) for r in self.health.records()):
            for server in self.router.servers:
                if server not in refused:
                    return server
            await asyncio.sleep(POLL_S)
            self._select()
        raise list(refused.values())[-1]

    async def _ask(
        self, server: Server, req: ModelRequest, sampled: list[int], budget: int, version: int
    ) -> Chunk:
        """Send one request, and check its reply."""
        assert self._connections is not None
        # An id of this attempt: after a broken connection the one before may still run, and servers
        # refuse a second request with its id.
        rid = f"{req.rid}-{next(self._attempts)}"
        ids = req.input_ids + sampled
        start = len(ids) - 1 if sampled else 0  # of the tokens before, the experts are known
        sampling = replace(req.sampling, seed=seed_of(req, self._seed))
        payload = self._wire.generate_payload(ids, sampling, budget, len(sampled), rid)
        if req.images:
            payload = self._wire.with_images(payload, req)
        if self._sizes is not None:
            payload |= self._wire.experts_fields(start)
        self._trial = req
        record, started = self.health.record(server), time.monotonic()
        record.requests += 1
        with self.router.request_to(server):
            body = await self._connections.post(
                server, self._wire.routes.generate, payload | self._adapter(version)
            )
        seconds = time.monotonic() - started
        await self._turns.wait()
        chunk = self._wire.parse_generate(body)
        if self._lora_name:
            chunk = replace(chunk, versions=[version] * len(chunk.tokens))
        vocab_size = None if self._model is None else self._model.vocab_size
        newest = self.version + 1 if self._knows_versions else None
        asked = Asked(rid, budget, vocab_size, newest, self._sizes, len(ids) - 1 - start)
        chunk = checked(chunk, asked)
        self.health.replied(server, seconds, len(chunk.tokens))
        return chunk

    async def _note_failure(self, server: Server, error: Exception, count: int) -> None:
        self.health.failed(server, type(error).__name__)
        self._last_failure = f"{type(error).__name__} ({error}) from server {server.describe()}"
        if isinstance(error, aiohttp.ClientConnectorError):
            if self.health.record(server).state is State.SERVING:
                await self._query(server)
        elif count > self._num_retries and self.health.record(server).state is State.SERVING:
            self._reject(server, "no_reply", f"it broke a request off {count} times: {self._last_failure}")

    def _note_refusal(self, server: Server, error: RequestRefused, failed: Counter[Server]) -> None:
        self.health.failed(server, f"http_{error.status}")
        self._last_failure = str(error)
        if error.status == TOO_MANY_REQUESTS or error.retry_after_s is not None:
            delay_s = self.health.delayed(server, error.status, error.retry_after_s)
            asyncio.get_running_loop().call_later(delay_s + 0.001, self._select)
            self._select()
        elif failed[server] > self._num_retries or error.status < 500:
            if not any(may_answer(r) for r in self.health.records() if r.server != server):
                raise error
            self._reject(server, f"http_{error.status}", str(error))

    def _reject(self, server: Server, rule: str, example: str) -> None:
        assert self._connections is not None
        self._last_failure = f"{server.address}: {example}"
        self.health.rejected(server, rule, example)
        self._select()
        if self.router.servers:
            self._connections.hang_up(server)  # its other replies may be wrong, too

    async def _wait_for_descriptor(self, error: BaseException) -> None:
        """Wait after an error that is this process's own; it is logged once."""
        if not self._is_at_limit:
            logger.warning("this process, not a server, is at a limit: %s; requests wait", error)
        self._is_at_limit = True
        self._last_failure = f"this process is at a limit: {error}"
        await asyncio.sleep(self._retry_delay_s)

    def _adapter(self, version: int) -> dict[str, str]:
        """Return the request's adapter field; none before the first update: the adapter is 0."""
        if self._lora_name is None or version == self._first_version:
            return {}
        return self._wire.adapter_fields(adapter_name(self._lora_name, version))

    async def _lacks(self, version: int, server: Server) -> bool:
        """Return whether a server has another version's adapter, or none after a restart."""
        if self._lora_name is None:
            return False
        if (held := await self._version_on(server)) < version:
            self.health.change(server, State.STALE, f"restarted without the adapter of version {version}")
            self._select()
        return held != version

    async def _version_on(self, server: Server) -> int:
        """Return the version of a server's weights; the first where it reports none."""
        reported = await asyncio.to_thread(ask_version, server, self._wire)
        number = parse_version(reported or "")
        return self._first_version if number is None else number

    async def _wait_for_server(self) -> Server:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._server_wait_s
        async with self._searching:  # one request searches for all
            while self._may_come() and loop.time() < deadline:
                if self._discovery.is_elastic:
                    await asyncio.to_thread(self.refresh)
                self._select()
                await asyncio.sleep(0 if self.router.servers else POLL_S)
            if self.router.servers:
                return self.router.servers[0]
        raise ServerDied(
            f"no inference server is left with the weights of version {self.version}: {self._last_failure}"
        )

    def _may_come(self) -> bool:
        if self.router.servers or self._is_closed:
            return False
        return self._discovery.is_elastic or any(
            may_answer(record) or record.state is State.HUNG for record in self.health.records()
        )

    def _begin_request(self) -> None:
        self._num_running += 1
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._watchers, self._turns = loop, {}, FewPerTurn()
            self._connections = self._connect(self._timeout_s)
        if self._num_running == 1 or len(self._watchers) < len(self.health.records()):
            for record in self.health.records():
                watcher = self._watchers.get(record.server)
                if watcher is None or watcher.done():
                    self._watchers[record.server] = loop.create_task(self._watch(record))

    async def _watch(self, record: ServerRecord) -> None:
        """Query one server while requests run; a hung one's requests are sent to others."""
        server = record.server
        while self._num_running:
            is_missing = record.state is State.SERVING and record.misses > 0
            await asyncio.sleep(0.1 if is_missing else self._health_interval_s)
            if record.state is State.QUARANTINED:
                if time.monotonic() >= record.trial_at:
                    await self._try(server)
            elif record.replied_at < time.monotonic() - self._health_interval_s:
                await self._query(server)

    async def _query(self, server: Server) -> None:
        """Query the version of one server, and note the answer."""
        assert self._connections is not None
        loop = asyncio.get_running_loop()
        current, started = self.version, loop.time()
        try:
            body = await self._connections.get(server, self._wire.routes.version, self._health_timeout_s)
            version = self._wire.parse_weight_version(body)
        except aiohttp.ClientConnectorError as error:
            if not is_own_error(error):
                self.health.change(server, State.LOST, f"it refuses connections: {error}")
        except (aiohttp.ClientError, TimeoutError, RequestRefused, MalformedReply) as error:
            # A late answer proves nothing where this event loop itself was blocked.
            in_time = loop.time() - started < 2 * self._health_timeout_s
            if in_time and not await self._loads_weights(server):
                self.health.missed(server, f"the last: {type(error).__name__} {error}")
        else:
            if server in self._approved:
                self._note(server, version, current)
            else:
                await asyncio.to_thread(self._note, server, version, current)
        self._select()
        record = self.health.record(server)
        if record.state in (State.HUNG, State.LOST):
            self._last_failure = f"no answer from server {server.describe()}"
        elif record.state is not State.STALE:  # it may hold requests until it is updated
            return
        if self.router.servers or time.time() - record.since > self._server_wait_s:
            self._connections.hang_up(server)

    async def _loads_weights(self, server: Server) -> bool:
        if self._wire.routes.alive == self._wire.routes.version:
            return False
        assert self._connections is not None
        try:
            await self._connections.get(server, self._wire.routes.alive, self._health_timeout_s)
        except (aiohttp.ClientError, TimeoutError, RequestRefused):
            return False
        return True

    async def _try(self, server: Server) -> None:
        """Send a quarantined server a request of some tokens; a valid reply ends the quarantine."""
        request = self._trial
        assert request is not None  # its quarantine began with a request
        try:
            num_tokens = min(TRIAL_TOKENS, request.num_new_tokens())
            chunk = await self._ask(server, request, [], num_tokens, self.version)
        except (aiohttp.ClientError, TimeoutError, RequestRefused, MalformedReply) as error:
            self.health.rejected(server, "trial", str(error), is_trial=True)
        else:
            if chunk.tokens:  # an aborted reply may hold none, and proves nothing
                self.health.change(server, State.SERVING, "its trial request passed")
        self._select()


def may_answer(record: ServerRecord) -> bool:
    is_on_trial = record.state is State.QUARANTINED and record.num_quarantines <= MAX_TRIALS
    return is_on_trial or record.state is State.SERVING
