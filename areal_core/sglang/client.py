"""Sample tokens from SGLang servers over HTTP, through pauses, weight updates and lost servers.

    agenerate (event loop)                                            what can happen to it
    ---------------------------------------------------------------   --------------------------------------------------
    a server from the router <---- waits for one to join (elastic) -- none is left
    POST /generate, prompt + tokens so far                            pause "abort": the reply holds the tokens so far
      ... the server holds it while it is paused ...                  pause "retract", "in_place": a later, complete reply
    reply: tokens, logprobs, and the version of each token            the server dies: sent again, to another one
    aborted? again, with the longer prompt                            the server restarted with old weights: discarded

`set_version` (trainer's thread) and the health check (every `health_interval_s` while requests run)
query the weight version of every known server: only servers with the current weights get requests.

Each token has the version that the *server* reports, so a reply that spans a weight update has the
right versions. Where adapters are served (`lora_name`) a request names the adapter of one version,
which is then the version of its tokens; after an abort it is the server's current one.

The `Router` distributes prompts round-robin and keeps the samples of a prompt, and the turns of a
conversation, on one server, whose prefix cache serves them all. A server with far more running
requests than the least loaded one loses this affinity: a group of 64 still spreads over two
servers.
"""

import asyncio
import itertools
import json
import logging
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from areal_core.rollout.errors import MalformedReply, RequestRefused, ServerDied
from areal_core.rollout.types import ModelRequest, ModelResponse, Sampling
from areal_core.sglang.discovery import Discovery
from areal_core.sglang.pool import ServerPool
from areal_core.sglang.server import MESSAGE_LIMIT, RunModel, Server, ask_version, rejection_reason

READ_BUFFER_BYTES = 10 * 1024 * 1024
CONNECT_TIMEOUT_S = 30.0
REMEMBERED_PROMPTS = 65536  # whose server the router knows
# A server is overloaded above two times the requests of the least loaded one, and this many.
SPARE_REQUESTS = 8
MAX_MISSES = 3  # failed health checks in a row, after which requests go to other servers
POLL_S = 0.5  # between two searches for a server
MAX_FAILURES = 100  # of one request: a server that always breaks it off is not retried indefinitely
MAX_THREADS = 32  # that query servers
logger = logging.getLogger(__name__)


class Connections:
    """Persistent connections of one event loop.

    Args:
        timeout_s: maximum seconds for one request.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        self._sessions: dict[Server, aiohttp.ClientSession] = {}

    @property
    def servers(self) -> list[Server]:
        """The servers to which a session is open."""
        return list(self._sessions)

    async def post(self, server: Server, path: str, payload: dict[str, Any]) -> bytes:
        """Return the body of a 200 reply.

        Raises:
            RequestRefused: another status.
            aiohttp.ClientError, TimeoutError: no connection, or no complete reply in time.
        """
        async with self._session(server).post(f"http://{server.address}{path}", json=payload) as reply:
            body = await reply.read()
        if reply.status == 200:
            return body
        message = (
            f"{server.address}{path} answered {reply.status}: {body[:MESSAGE_LIMIT].decode(errors='replace')}"
        )
        raise RequestRefused(message, reply.status)

    def _session(self, server: Server) -> aiohttp.ClientSession:
        if server not in self._sessions:
            self._sessions[server] = aiohttp.ClientSession(
                timeout=self._timeout,
                read_bufsize=READ_BUFFER_BYTES,
                connector=aiohttp.TCPConnector(limit=0),
            )
        return self._sessions[server]

    async def hang_up(self, server: Server) -> None:
        """Abort the requests that wait for a server, with an `aiohttp.ClientError`."""
        await self._sessions.pop(server).close()

    async def close(self) -> None:
        """Abort every request and close all sessions."""
        for server in self.servers:
            await self.hang_up(server)


class Router:
    """The usable servers and their running requests, for one event loop.

    Any thread may assign `servers`.
    """

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = list(servers)
        self._turn = itertools.count()
        self._running: defaultdict[Server, int] = defaultdict(int)
        self._homes: OrderedDict[Hashable, Server] = OrderedDict()

    def choose(self, prompt: Hashable, avoid: Server | None = None) -> Server | None:
        """Return a server, not `avoid` while there is another; None when there is none."""
        servers = self.servers
        candidates = [server for server in servers if server != avoid] or servers
        if not candidates:
            return None
        home = self._homes.get(prompt)
        if home is None or home not in candidates:
            home = candidates[next(self._turn) % len(candidates)]
        elif self._is_overloaded(home, candidates):
            home = min(candidates, key=self._running.__getitem__)
        self._homes[prompt] = home
        self._homes.move_to_end(prompt)
        if len(self._homes) > REMEMBERED_PROMPTS:
            self._homes.popitem(last=False)
        return home

    def _is_overloaded(self, server: Server, others: Sequence[Server]) -> bool:
        return self._running[server] > 2 * min(self._running[other] for other in others) + SPARE_REQUESTS

    @contextmanager
    def request_to(self, server: Server) -> Iterator[None]:
        """Count a request while it runs."""
        self._running[server] += 1
        try:
            yield
        finally:
            self._running[server] -= 1

    def drop(self, server: Server) -> None:
        """Stop using a server."""
        self.servers = [other for other in self.servers if other != server]


@dataclass(frozen=True)
class Chunk:
    """The tokens of one reply, and the reason for its end."""

    tokens: list[int]
    logprobs: list[float]  # log_softmax(logits / temperature) before top-k, top-p (SGLang >= 0.4.6)
    versions: list[int | None]  # None where the server has no numbered weights yet
    finish: str  # "stop", "length" or "abort"


def adapter_name(name: str, version: int | str) -> str:
    """Return the name of one version of an adapter on the servers."""
    return f"{name}-v{version}"


def generate_payload(
    input_ids: list[int], sampling: Sampling, num_new_tokens: int, num_sampled: int
) -> dict[str, Any]:
    """Return the JSON of a `/generate` request.

    The last `num_sampled` of `input_ids` are of the completion.
    """
    params = {
        "max_new_tokens": num_new_tokens,
        "min_new_tokens": max(0, sampling.min_new_tokens - num_sampled),
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
        "frequency_penalty": sampling.frequency_penalty,
    }
    if sampling.stop:
        params["stop"] = sampling.stop
    return {
        "input_ids": input_ids,
        "sampling_params": params,
        "return_logprob": True,
        "stream": False,
    }


def parse_generate(body: bytes, version: int | None = None) -> Chunk:
    """Parse a reply of `/generate`.

    Args:
        version: version of all tokens, if the request named it; None for those in the reply.

    Raises:
        MalformedReply: a field is missing, or the lists differ in length.
    """
    try:
        meta = json.loads(body)["meta_info"]
        finish = meta["finish_reason"]
        if finish["type"] == "abort" and not meta.get(
            "output_token_logprobs"
        ):  # aborted before its first token
            return Chunk([], [], [], "abort")
        logprobs = [float(entry[0]) for entry in meta["output_token_logprobs"]]
        tokens = [int(entry[1]) for entry in meta["output_token_logprobs"]]
        count = int(meta["completion_tokens"])
        spans = meta.get("weight_versions") or [
            {"version": meta.get("weight_version", ""), "start": 0, "end": count}
        ]
        versions: list[int | None] = []
        for span in spans:
            of_span = parse_version(span["version"]) if version is None else version
            versions += [of_span] * (span["end"] - span["start"])
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise MalformedReply(
            f"a /generate reply is not what SGLang 0.5 sends ({error!r}); it begins {body[:200]!r}"
        ) from error
    if len(tokens) != count or len(versions) != count:
        raise MalformedReply(
            f"a /generate reply holds {len(tokens)} logprobs and {len(versions)} versions for {count} tokens"
        )
    return Chunk(tokens, logprobs, versions, str(finish["type"]))


def parse_version(text: str) -> int | None:
    """Return the number of a weight version; None before the first weight update ("default")."""
    return int(text) if text.isdecimal() else None


class SGLangClient:
    """An `InferenceEngine` over one or more SGLang servers that hold the same weights.

    Args:
        servers: the initial servers, with the weights of `version`.
        timeout_s: maximum seconds for one completion.
        num_retries: further attempts after a broken connection, a time-out or a 5xx.
        retry_delay_s: seconds before a request is sent to the same server again.
        version: version of the weights that servers have before the first weight update.
        discovery: finds further servers; by default the set is fixed.
        model: the model that a new server must serve; None accepts any.
        server_wait_s: maximum seconds to wait for a server when none is left and more may join.
        health_interval_s: seconds between two health checks.
        pause_mode: see `ServerPool`.
        lora_name: name of the adapters without their version; None if weight updates send all
            weights.
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
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="query-servers")
        self._searching = asyncio.Lock()
        self._misses: Counter[Server] = Counter()
        self._connections = Connections(timeout_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_running = 0
        self._is_closed = False
        self._watching: asyncio.Task[None] | None = None
        self._last_failure = "none was given"

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Sample one completion, in several requests if it is aborted or a server dies.

        Raises:
            PromptTooLong: no space is left for a new token.
            RequestRefused: a server answered 4xx, or servers answered 5xx too often.
            ServerDied: no server is left, and none joined in time.
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
            held = dict(zip(known, self._threads.map(ask_version, known), strict=True))
            for server, version in held.items():
                self._misses[server] = self._misses[server] + 1 if version is None else 0
            self.router.servers = [
                server for server in known if self._is_usable(server, held[server], current)
            ]

    def _is_usable(self, server: Server, version: str | None, current: int) -> bool:
        """Return whether a server holds the current weights, or newer ones during a weight update.

        A server in use may miss some answers.
        """
        if version is None:
            return server in self.router.servers and self._misses[server] < MAX_MISSES
        number = parse_version(version)
        if not (current == self._first_version if number is None else number >= current):
            return False
        if server not in self._approved and not rejection_reason(server, self._model):
            logger.info("sampling from %s", server.address)
            self._approved.add(server)
        return server in self._approved

    def close(self) -> None:
        """Close from outside the event loop, while it runs; inside, await `aclose`."""
        if self._loop is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self.aclose(), self._loop).result()
        self._pool.close()
        self._threads.shutdown()

    async def aclose(self) -> None:
        """End running requests with `ServerDied`."""
        self._is_closed = True
        if self._watching is not None:
            self._watching.cancel()
        await self._connections.close()

    async def _generate(self, req: ModelRequest, sampled: list[int], budget: int, was_cut: bool) -> Chunk:
        """Request one chunk from a server with the current weights."""
        # No `rid`: after a broken connection the first attempt may still run, and a second one
        # with the same id is refused.
        payload = generate_payload(req.input_ids + sampled, req.sampling, budget, len(sampled))
        prompt = req.metadata.get("prompt_id", req.rid)
        failed: Counter[Server] = Counter()
        avoid, needs_version = None, was_cut
        while not self._is_closed:
            server = self.router.choose(prompt, avoid) or await self._wait_for_server()
            if server == avoid:
                await asyncio.sleep(self._retry_delay_s)
            version = self.version
            if self._lora_name and needs_version:  # an update reaches servers before this client
                version = max(version, await self._version_on(server))
            try:
                with self.router.request_to(server):
                    body = await self._connections.post(server, "/generate", payload | self._adapter(version))
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
                avoid, needs_version = server, True
                failed[server] += 1
                may_pass = error.status >= 500 and failed.total() <= self._num_retries
                if failed.total() > MAX_FAILURES or not (may_pass or await self._lacks(version, server)):
                    raise
            else:
                if self._is_current(chunk, version):
                    return chunk
                self._last_failure = f"{server.address} restarted without the weights of version {version}"
                self._drop(server)
        raise ServerDied("the client was closed while this request ran")

    def _is_current(self, chunk: Chunk, version: int) -> bool:
        """Return whether no token is of an older version, as after a restart of the server."""
        if version == self._first_version:
            return True
        return all(v is not None and v >= version for v in chunk.versions)

    def _adapter(self, version: int) -> dict[str, str]:
        """Return the request's adapter field; none before the first update: the adapter is 0."""
        if self._lora_name is None or version == self._first_version:
            return {}
        return {"lora_path": adapter_name(self._lora_name, version)}

    async def _lacks(self, version: int, server: Server) -> bool:
        """Return whether a server has another version's adapter, or none after a restart."""
        if self._lora_name is None:
            return False
        if (held := await self._version_on(server)) < version:
            self._last_failure = f"{server.address} restarted without the adapter of version {version}"
            self._drop(server)
        return held != version

    async def _version_on(self, server: Server) -> int:
        """Return the version of a server's weights; the first where it reports none."""
        reported: str | None = await asyncio.to_thread(ask_version, server)
        number = parse_version(reported or "")
        return self._first_version if number is None else number

    async def _wait_for_server(self) -> Server:
        """Wait for a usable server. Raises `ServerDied`, at once if no more can join."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._server_wait_s
        async with self._searching:  # one request searches for all
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
        """Check the servers while requests run; requests of a hung server are sent to others."""
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
