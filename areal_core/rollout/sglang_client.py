"""Samples tokens from SGLang servers over HTTP, and comes through aborts, weight pushes and the death of a server.

A pause cuts a request: its reply says "abort" and holds the tokens so far. The client sends the longer prompt again, the
server holds it until generation goes on, and the rest is sampled by the new weights. Each token keeps the version that the
*server* says it was sampled by, so a reply that crosses a push is stamped rightly.
"""

import asyncio
import itertools

import aiohttp

from areal_core.rollout.errors import RequestRefused, ServerDied
from areal_core.rollout.servers import MESSAGE_LIMIT, Server, ServerPool
from areal_core.rollout.sglang_wire import Chunk, generate_payload, parse_generate
from areal_core.rollout.types import ModelRequest, ModelResponse

READ_BUFFER_BYTES = 10 * 1024 * 1024


class SGLangClient:
    """An `InferenceEngine` over one or more SGLang servers that hold the same weights.

    Args:
        servers: where they are.
        timeout_s: most seconds for one completion.
        num_retries: further attempts at a server after a broken connection, a time-out or a 5xx.
        retry_delay_s: seconds between them.
        version: version of tokens from servers that were never pushed to.
    """

    def __init__(
        self,
        servers: list[Server],
        *,
        timeout_s: float = 3600.0,
        num_retries: int = 3,
        retry_delay_s: float = 1.0,
        version: int = 0,
    ) -> None:
        self.version = version
        self.alive = list(servers)
        self._pool = ServerPool(servers)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=30.0)
        self._num_retries = num_retries
        self._retry_delay_s = retry_delay_s
        self._turn = itertools.count()
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last_failure = "none was given"

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Samples one completion, over as many requests as aborts cut it into.

        Raises:
            PromptTooLong: no room to sample.
            RequestRefused: a server answered 4xx.
            ServerDied: no server is left.
        """
        budget = req.num_new_tokens()
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        finish = "abort"
        while finish == "abort" and len(tokens) < budget:
            chunk = await self._generate(req, tokens, budget - len(tokens))
            tokens += chunk.tokens
            logprobs += chunk.logprobs
            versions += [self.version if v is None else v for v in chunk.versions]
            finish = chunk.finish
        return ModelResponse(
            input_tokens=req.input_ids,
            output_tokens=tokens,
            output_logprobs=logprobs,
            output_versions=versions,
            stop_reason="length" if finish == "abort" else finish,
        )

    def set_version(self, version: int) -> None:
        self.version = version

    def pause(self) -> None:
        self._pool.pause()

    def resume(self) -> None:
        self._pool.resume()

    def close(self) -> None:
        """Call from outside the event loop, while it runs; inside, await `aclose`."""
        if self._session is not None:
            asyncio.run_coroutine_threadsafe(self.aclose(), self._loop).result()
        self._pool.close()

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
        self._session = None

    async def _generate(self, req: ModelRequest, sampled: list[int], num_new_tokens: int) -> Chunk:
        """One chunk, from whichever server is alive."""
        # No `rid`: after a broken connection the first attempt may still run, and a second with its name is refused.
        payload = generate_payload(req.input_ids + sampled, req.sampling, num_new_tokens, len(sampled))
        while self.alive:
            server = self.alive[next(self._turn) % len(self.alive)]
            try:
                return parse_generate(await self._post(server, "/generate", payload))
            except (aiohttp.ClientError, TimeoutError) as error:
                self.alive = [s for s in self.alive if s != server]
                self._last_failure = f"{type(error).__name__} ({error}) from server {server.describe()}"
        raise ServerDied(f"no inference server is left: {self._last_failure}")

    async def _post(self, server: Server, path: str, payload: dict) -> bytes:
        """The body of a 200 reply. Raises `RequestRefused` for a 4xx, and aiohttp's error or `TimeoutError` after the last attempt."""
        for attempt in range(self._num_retries + 1):
            if attempt > 0:
                await asyncio.sleep(self._retry_delay_s)
            try:
                async with self._open_session().post(f"http://{server.address}{path}", json=payload) as reply:
                    body = await reply.read()
            except (aiohttp.ClientError, TimeoutError) as caught:
                error = caught
                continue
            if reply.status == 200:
                return body
            said = f"answered {reply.status}: {body[:MESSAGE_LIMIT].decode(errors='replace')}"
            if reply.status < 500:
                raise RequestRefused(f"{server.address}{path} {said}", reply.status)
            error = aiohttp.ClientPayloadError(said)
        raise error

    def _open_session(self) -> aiohttp.ClientSession:
        """One session per event loop, with connections that stay open."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            self._loop = loop
            self._session = aiohttp.ClientSession(
                timeout=self._timeout,
                read_bufsize=READ_BUFFER_BYTES,
                connector=aiohttp.TCPConnector(limit=0),
            )
        return self._session
