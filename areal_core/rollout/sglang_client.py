"""Samples tokens from SGLang servers over HTTP, and comes through pauses, weight pushes and the death of servers.

    agenerate (event loop)                                            what can happen to it
    ---------------------------------------------------------------   --------------------------------------------------
    a server from the router <---- waits for one to come (elastic) -- none is left
    POST /generate, prompt + tokens so far                            pause "abort": cut; the reply holds the tokens so far
      ... the server holds it while it is paused ...                  pause "retract", "in_place": the reply comes later, whole
    reply: tokens, logprobs, and the version of each token            the server dies: sent again, to another one
    cut? again, with the longer prompt                                the server came back with old weights: thrown away

    set_version (trainer's thread), health check (every `health_interval_s` while requests run)
    both ask every server that is known which weights it holds: one with the current weights is asked for tokens, no other

Each token keeps the version that the *server* says it was sampled by, so a reply that crosses a push is stamped rightly. Where adapters are
served (`lora_name`) a request names that of one version, which is then the version of its tokens; after a cut, that of the server.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import aiohttp

from areal_core.rollout.connections import Connections
from areal_core.rollout.discovery import Discovery
from areal_core.rollout.errors import RequestRefused, ServerDied
from areal_core.rollout.routing import Router
from areal_core.rollout.server_identity import RunModel, ask_version, why_not
from areal_core.rollout.server_pool import ServerPool
from areal_core.rollout.servers import Server
from areal_core.rollout.sglang_wire import (
    Chunk,
    adapter_name,
    generate_payload,
    parse_generate,
    parse_version,
)
from areal_core.rollout.types import ModelRequest, ModelResponse

MAX_MISSES = 3  # health checks in a row without an answer: what the server is doing is given to another
POLL_S = 0.5
MAX_FAILURES = 100  # of one request; a server that takes requests and breaks them off would be asked for ever
MAX_THREADS = 32
logger = logging.getLogger(__name__)


class SGLangClient:
    """An `InferenceEngine` over one or more SGLang servers that hold the same weights.

    Args:
        servers: the first of them, with the weights that `version` names.
        timeout_s: most seconds for one completion.
        num_retries: further attempts after a broken connection, a time-out or a 5xx.
        retry_delay_s: seconds before the same server is asked again.
        version: of the weights that servers have before anything is pushed to them.
        discovery: where more servers may appear; by default the set is fixed.
        model: what a server that appears must serve; None takes any.
        server_wait_s: most seconds to wait for a server when none is left and more may appear.
        health_interval_s: seconds between two health checks.
        pause_mode: see `ServerPool`.
        lora_name: of the adapters that are pushed, before their version; None where whole weights are.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        timeout_s: float = 3600.0,
        num_retries: int = 3,
        retry_delay_s: float = 1.0,
        version: int = 0,
        discovery: Discovery | None = None,
        model: RunModel | None = None,
        server_wait_s: float = 300.0,
        health_interval_s: float = 10.0,
        pause_mode: str = "abort",
        lora_name: str | None = None,
    ) -> None:
        self.version = version
        self.is_paused = False
        self.router = Router(servers)
        self._first_version = version
        self._discovery = discovery or Discovery(tuple(servers))
        self._model = model
        self._approved = set(servers)
        self._refreshing = threading.Lock()
        self._pool = ServerPool(servers, pause_mode=pause_mode)
        self._timeout_s = timeout_s
        self._num_retries = num_retries
        self._retry_delay_s = retry_delay_s
        self._server_wait_s = server_wait_s
        self._health_interval_s = health_interval_s
        self._lora_name = lora_name
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="ask-servers")
        self._searching = asyncio.Lock()
        self._misses: Counter[Server] = Counter()
        self._connections = Connections(timeout_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_running = 0
        self._is_closed = False
        self._watching: asyncio.Task[None] | None = None
        self._last_failure = "none was given"

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Samples one completion, over as many requests as aborts and deaths cut it into.

        Raises:
            PromptTooLong: no room to sample.
            RequestRefused: a server answered 4xx, or servers answered 5xx too often.
            ServerDied: no server is left, and none came in time.
        """
        budget = req.num_new_tokens()
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        finish = ""
        self._begin_request()
        try:
            while finish in ("", "abort") and len(tokens) < budget:
                chunk = await self._generate(req, tokens, budget - len(tokens), finish == "abort")
                tokens += chunk.tokens
                logprobs += chunk.logprobs
                versions += [self._first_version if v is None else v for v in chunk.versions]
                finish = chunk.finish
        finally:
            self._num_running -= 1
        return ModelResponse(
            input_tokens=req.input_ids,
            output_tokens=tokens,
            output_logprobs=logprobs,
            output_versions=versions,
            stop_reason="length" if finish == "abort" else finish,
        )

    def set_version(self, version: int) -> None:
        """Says which weights were pushed, and from now on asks the servers that hold them."""
        self.version = version
        self.refresh()

    def pause(self) -> None:
        self.is_paused = True
        self._pool.servers = list(self.router.servers)
        self._pool.pause()

    def resume(self) -> None:
        self._pool.resume()
        self.is_paused = False

    def refresh(self) -> None:
        """Asks every known server for its weights. From any thread; blocks for the slowest answer, at most some seconds."""
        with self._refreshing:
            current = (
                self.version
            )  # before the servers are asked: an answer may be older than a push that ends meanwhile
            known = self._discovery.servers()
            held = dict(zip(known, self._threads.map(ask_version, known), strict=True))
            for server, version in held.items():
                self._misses[server] = self._misses[server] + 1 if version is None else 0
            self.router.servers = [
                server for server in known if self._is_usable(server, held[server], current)
            ]

    def _is_usable(self, server: Server, version: str | None, current: int) -> bool:
        """Whether a server holds the current weights, or newer ones, as during a push; some missed answers are forgiven."""
        if version is None:
            return server in self.router.servers and self._misses[server] < MAX_MISSES
        number = parse_version(version)
        if not (current == self._first_version if number is None else number >= current):
            return False
        if server not in self._approved and not why_not(server, self._model):
            logger.info("sampling from %s", server.address)
            self._approved.add(server)
        return server in self._approved

    def close(self) -> None:
        """Call from outside the event loop, while it runs; inside, await `aclose`."""
        if self._loop is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self.aclose(), self._loop).result()
        self._pool.close()
        self._threads.shutdown()

    async def aclose(self) -> None:
        """Ends what is running with `ServerDied`."""
        self._is_closed = True
        if self._watching is not None:
            self._watching.cancel()
        await self._connections.close()

    async def _generate(self, req: ModelRequest, sampled: list[int], budget: int, was_cut: bool) -> Chunk:
        """One chunk, from whichever server has the weights."""
        # No `rid`: after a broken connection the first attempt may still run, and a second with its name is refused.
        payload = generate_payload(req.input_ids + sampled, req.sampling, budget, len(sampled))
        prompt = req.metadata.get("prompt_id", req.rid)
        failed: Counter[Server] = Counter()
        avoid, asks_version = None, was_cut
        while not self._is_closed:
            server = self.router.choose(prompt, avoid) or await self._wait_for_server()
            if server == avoid:
                await asyncio.sleep(self._retry_delay_s)
            version = self.version
            if self._lora_name and asks_version:  # a push tells the servers before it tells this client
                version = max(version, await self._held_by(server))
            try:
                with self.router.request_to(server):
                    asked = payload | self._adapter(version)
                    body = await self._connections.post(server, "/generate", asked)
                chunk = parse_generate(body, version if self._lora_name else None)
            except (aiohttp.ClientError, TimeoutError) as error:
                avoid = server
                failed[server] += 1
                self._last_failure = f"{type(error).__name__} ({error}) from server {server.describe()}"
                if failed[server] > self._num_retries:
                    self._drop(server)
                if failed.total() > MAX_FAILURES:
                    raise ServerDied(
                        f"a request failed {MAX_FAILURES} times: {self._last_failure}"
                    ) from error
            except RequestRefused as error:
                avoid, asks_version = server, True
                failed[server] += 1
                may_pass = error.status >= 500 and failed.total() <= self._num_retries
                if failed.total() > MAX_FAILURES or not (may_pass or await self._lacks(version, server)):
                    raise
            else:
                if self._is_current(chunk, version):
                    return chunk
                self._last_failure = f"{server.address} came back without the weights of version {version}"
                self._drop(server)
        raise ServerDied("the client was closed while this request ran")

    def _is_current(self, chunk: Chunk, version: int) -> bool:
        """Whether no token is older than the weights that the server had when it was asked: else it has been started anew."""
        if version == self._first_version:
            return True
        return all(v is not None and v >= version for v in chunk.versions)

    def _adapter(self, version: int) -> dict[str, str]:
        """What a request says of the adapter; before the first push there is none, and a new one changes nothing."""
        if self._lora_name is None or version == self._first_version:
            return {}
        return {"lora_path": adapter_name(self._lora_name, version)}

    async def _lacks(self, version: int, server: Server) -> bool:
        """Whether a server refuses because it has another version's adapter: a newer one, or, after it was started anew, none."""
        if self._lora_name is None:
            return False
        if (held := await self._held_by(server)) < version:
            self._last_failure = f"{server.address} came back without the adapter of version {version}"
            self._drop(server)
        return held != version

    async def _held_by(self, server: Server) -> int:
        """The version of a server's weights; the first where it says nothing."""
        number = parse_version(await asyncio.to_thread(ask_version, server) or "")
        return self._first_version if number is None else number

    async def _wait_for_server(self) -> Server:
        """Raises `ServerDied` at once where no more can come."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._server_wait_s
        async with self._searching:  # one request asks for all
            while self._may_come() and loop.time() < deadline:
                await asyncio.to_thread(self.refresh)
                await asyncio.sleep(0 if self.router.servers else POLL_S)
            if self.router.servers:
                return self.router.servers[0]
        raise ServerDied(
            f"no inference server is left with the weights of version {self.version}: {self._last_failure}"
        )

    def _may_come(self) -> bool:
        return self._discovery.is_elastic and not self.router.servers and not self._is_closed

    def _begin_request(self) -> None:
        self._num_running += 1
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._connections, self._watching = loop, Connections(self._timeout_s), None
        if self._watching is None or self._watching.done():
            self._watching = loop.create_task(self._watch())

    async def _watch(self) -> None:
        """Checks the servers' health as long as requests run; what a hung server was doing is given to others."""
        while self._num_running:
            await asyncio.sleep(self._health_interval_s)
            await asyncio.to_thread(self.refresh)
            for server in self._connections.servers:
                if self._misses[server] >= MAX_MISSES:
                    self._last_failure = (
                        f"no answer to {MAX_MISSES} health checks from server {server.describe()}"
                    )
                    await self._connections.hang_up(server)

    def _drop(self, server: Server) -> None:
        logger.warning("inference server dropped: %s", self._last_failure)
        self.router.drop(server)
