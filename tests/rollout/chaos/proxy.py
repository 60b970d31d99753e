"""A proxy in front of one inference server, with faults at given requests and a list of replies.

    client --> FaultProxy (aiohttp, a thread of its own) --> server behind it
                 request n of its route: a fault?   kill, stop: on the server, by another thread
                 every reply that was delivered: `replies`, intact or with its fault

While the server is dead, nothing listens at the proxy's address either.
"""

import asyncio
import contextlib
import json
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import aiohttp
from aiohttp import web

from areal_core.rollout.http_thread import HttpThread
from areal_core.servers.server import Server
from tests.rollout.chaos.faults import (
    KILL,
    OTHER_REPLY,
    PROCESS,
    REFUSED,
    SLOW,
    TWICE,
    WRONG_BODY,
    WRONG_JSON,
    WRONG_STATUS,
    Fault,
    spoil_json,
)
from tests.rollout.chaos.history import Reply

MAX_BODY_BYTES = 64 << 20
RETRY_AFTER_S = 1
GENERATE = "/generate"


class FaultyServer(Protocol):
    """A server that can be killed, started again at its address, stopped and continued."""

    server: Server

    def kill(self) -> None:
        """End it at once; its connections are lost."""
        ...

    def restart(self) -> None:
        """Start it again, with the weights of the beginning, and wait until it answers."""
        ...

    def stop(self) -> None:
        """Let it hang: connections stay open, and nothing is answered."""
        ...

    def proceed(self) -> None:
        """Continue a server that hangs."""
        ...


class FaultProxy:
    """One server with its faults.

    Args:
        behind: the server.
        name: of the server in messages.
        faults: those of this server.

    Attributes:
        server: the address for clients.
        replies: every reply to `/generate` that was delivered completely, and every spoiled one.
        injected: how often each fault happened.
    """

    def __init__(self, behind: FaultyServer, name: str, faults: Sequence[Fault]) -> None:
        self.behind, self.name = behind, name
        self.replies: list[Reply] = []
        self.injected: Counter[str] = Counter()
        self._faults = {(fault.route, fault.at): fault for fault in faults}
        self._counts: Counter[str] = Counter()
        self._last: bytes | None = None  # an intact reply, to another prompt
        self._controls = ThreadPoolExecutor(1, thread_name_prefix="faults")
        self._acts: list[Future[None]] = []
        self._is_ending = threading.Event()
        self._http = HttpThread(self._application(), f"proxy-{name}")
        self.server = Server(f"127.0.0.1:{self._http.port}")

    def end_faults(self) -> None:
        """Inject no more, and let the server live again. Raises what a restart raised."""
        self._faults = {}
        self._is_ending.set()
        for act in self._acts:
            act.result()

    def close(self) -> None:
        """End faults and proxy; the server behind it continues."""
        self.end_faults()
        self._controls.shutdown()
        self._http.close()

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._handle)
        application.cleanup_ctx.append(self._session_of)
        return application

    async def _session_of(self, application: web.Application) -> Any:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        yield
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        route = "generate" if request.path == GENERATE else "control"
        fault = self._faults.get((route, self._counts[route]))
        self._counts[route] += 1
        if fault is not None and fault.kind in PROCESS:
            self.injected[fault.kind] += 1
            act = self._kill_for if fault.kind == KILL else self._stop_for
            self._acts.append(self._controls.submit(act, fault.seconds))
            if fault.kind == KILL:
                return lost(request)
            fault = None
        try:
            status, body, kind = await self._ask(request)
        except aiohttp.ClientError:
            return lost(request)
        if route == "generate" and status == 200:
            return await self._deliver(request, body, kind, fault)
        if fault is not None and route == "control":
            self.injected[fault.kind] += 1
            if fault.kind == "reset":
                return lost(request)
            if fault.kind in WRONG_STATUS:
                return web.Response(status=WRONG_STATUS[fault.kind], body=REFUSED)
            await asyncio.sleep(fault.seconds)
        return web.Response(status=status, body=body, content_type=kind)

    async def _ask(self, request: web.Request) -> tuple[int, bytes, str]:
        """Send a request to the server behind; return status, body and content type."""
        url = f"http://{self.behind.server.address}{request.path_qs}"
        kind = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        body = await request.read()
        async with self._session.request(request.method, url, data=body, headers=kind) as reply:
            return reply.status, await reply.read(), reply.content_type

    async def _deliver(
        self, request: web.Request, body: bytes, kind: str, fault: Fault | None
    ) -> web.StreamResponse:
        prompt, last, self._last = tuple((await request.json())["input_ids"]), self._last, body
        name = "" if fault is None else fault.kind
        spoiled = spoil_json(name, body) if name in WRONG_JSON else None
        if (name in WRONG_JSON and spoiled is None) or (name == OTHER_REPLY and last is None):
            name = ""  # nothing to spoil
        if fault is not None and name:
            self.injected[name] += 1
        if spoiled is not None or name == OTHER_REPLY:
            sent = spoiled if spoiled is not None else last
            assert sent is not None
            self._note(prompt, sent, name)
            return web.Response(body=sent, content_type=kind)
        if name in WRONG_BODY:
            return web.Response(body=WRONG_BODY[name](body), content_type=kind)
        if name in WRONG_STATUS:
            headers = {"Retry-After": str(RETRY_AFTER_S)} if name == "status_429" else {}
            return web.Response(status=WRONG_STATUS[name], body=REFUSED, headers=headers)
        if name == "reset":
            return lost(request)
        if name == "half_body":
            return await half(request, body)
        if fault is not None and name in SLOW:
            await asyncio.sleep(fault.seconds)
        self._note(prompt, body, "")
        if name == TWICE:
            return await twice(request, body)
        return web.Response(body=body, content_type=kind)

    def _note(self, prompt: tuple[int, ...], body: bytes, fault: str) -> None:
        self.replies.append(parse_reply(self.name, prompt, body, fault))

    def _kill_for(self, seconds: float) -> None:
        """Kill the server and start it again; on the thread of `_controls`."""
        port = self._http.port
        self._http.close()
        self.behind.kill()
        self._is_ending.wait(seconds)
        self.behind.restart()
        self._http = HttpThread(self._application(), f"proxy-{self.name}", port=port)

    def _stop_for(self, seconds: float) -> None:
        """Let the server hang; on the thread of `_controls`."""
        self.behind.stop()
        self._is_ending.wait(seconds)
        self.behind.proceed()


def parse_reply(server: str, prompt: tuple[int, ...], body: bytes, fault: str) -> Reply:
    """Parse a reply of `/generate` as it was sent, without any check."""
    meta = json.loads(body)["meta_info"]
    found = meta["output_token_logprobs"]
    spans = meta.get("weight_versions") or [
        {"version": meta["weight_version"], "start": 0, "end": len(found)}
    ]
    versions = [number_of(s["version"]) for s in spans for _ in range(s["start"], s["end"])]
    return Reply(
        server,
        prompt,
        tuple(entry[1] for entry in found),
        tuple(float("nan") if entry[0] is None else entry[0] for entry in found),
        tuple(versions),
        fault,
    )


def number_of(version: str) -> int:
    """Return the number of a weight version; 0 before the first update ("default")."""
    return int(version) if version.isdecimal() else 0


def lost(request: web.Request) -> web.Response:
    """Break the client's connection; the response that is returned reaches nobody."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)


async def half(request: web.Request, body: bytes) -> web.StreamResponse:
    """Announce the whole body, send half of it, and break the connection."""
    response = web.StreamResponse(headers={"Content-Length": str(len(body))})
    with contextlib.suppress(ConnectionError):  # the client did not wait
        await response.prepare(request)
        await response.write(body[: len(body) // 2])
    if request.transport is not None:
        request.transport.abort()
    return response


async def twice(request: web.Request, body: bytes) -> web.StreamResponse:
    """Send the reply, and then send it again, as if another request had been answered."""
    response = web.Response(body=body, content_type="application/json")
    with contextlib.suppress(ConnectionError):
        await response.prepare(request)
        await response.write_eof()
        if request.transport is not None:
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            request.transport.write(head.encode() + body)
    return response
