"""The transports of the proxy: a port and, for agents of this process, direct calls.

    agent of this process -- InProcessTransport --> answer() in the agent's own thread --+
    any process ------------ aiohttp (port) ------> answer() in the proxy's thread ------+-->
    rollout thread: engine

An agent that blocks its thread stops the other agents of that thread, but neither the engine nor
agents that use the port.
"""

import os
from pathlib import Path

import httpx
from aiohttp import web

from areal_core.agent.errors import UnreachableProxy, UnsafeProxy
from areal_core.agent.proxy import AgentProxy, Reply
from areal_core.rollout.http_thread import HttpThread
from areal_core.rollout.loop_thread import FewPerTurn
from areal_core.safety.http_requests import is_loopback
from areal_core.safety.private import default_root, make_private

KNOWN_ADMIN_KEY = "areal-admin-key"  # the default of AReaL's own files
SHORTEST_ADMIN_KEY = 16
# The engine's client has retried a failed request already; another retry is the agent's own choice.
NO_RETRY = {"x-should-retry": "false"}


class ProxyServer:
    """A proxy that listens in its own thread until it is closed.

    Args:
        proxy: its routes.
        host: address of the interface; any other than loopback requires your own key.
        port: 0 for a free one.
        max_body_bytes: a larger request is refused with 413.

    Raises:
        UnsafeProxy: other machines could reach it with a default or short admin key.
        UnreachableProxy: the port is in use, or the interface is not of this machine.
    """

    def __init__(
        self, proxy: AgentProxy, host: str = "127.0.0.1", port: int = 0, max_body_bytes: int = 8 << 20
    ) -> None:
        check_exposure(host, proxy.admin_key)
        self.proxy = proxy
        self.max_body_bytes = max_body_bytes
        application = web.Application(client_max_size=max_body_bytes)
        application.router.add_route("*", "/{path:.*}", self._handle)
        try:
            self._http = HttpThread(application, "agent-proxy", host, port, backlog=4096)
        except OSError as error:
            raise UnreachableProxy(
                f"the agent proxy cannot listen on {host}:{port}: {error.strerror}; set rollout.agent.port to 0 for a free one"
            ) from error
        self.thread = self._http.thread
        self.port = self._http.port
        reached_at = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        self.base_url = f"http://{reached_at}:{self.port}"

    def close(self) -> None:
        """Stop listening and end the calls in flight."""
        self._http.close()

    async def _handle(self, request: web.Request) -> web.Response:
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            reply = too_large(self.max_body_bytes)
        else:
            reply = await self.proxy.answer(request.method, request.path, request.headers, body)
        headers = NO_RETRY if reply.status >= 500 else {}
        return web.Response(
            status=reply.status, body=reply.body, content_type=reply.content_type, headers=headers
        )


class InProcessTransport(httpx.AsyncBaseTransport):
    """Transport of requests to a proxy of this process, and of other requests to the network.

    Without it, 2,000 episodes would need 4,000 sockets and spend half of their time in HTTP.
    """

    def __init__(self, server: ProxyServer, few_per_turn: FewPerTurn) -> None:
        self._server = server
        self._few_per_turn = few_per_turn
        self._network: httpx.AsyncHTTPTransport | None = None  # it reads all certificates of this machine

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not str(request.url).startswith(f"{self._server.base_url}/"):
            self._network = self._network or httpx.AsyncHTTPTransport()
            return await self._network.handle_async_request(request)
        body = await request.aread()
        if len(body) > self._server.max_body_bytes:
            reply = too_large(self._server.max_body_bytes)
        else:
            proxy = self._server.proxy
            reply = await proxy.answer(request.method, request.url.path, request.headers, body)
        await self._few_per_turn.wait()
        headers = {"content-type": reply.content_type} | (NO_RETRY if reply.status >= 500 else {})
        return httpx.Response(reply.status, headers=headers, content=reply.body)

    async def aclose(self) -> None:
        if self._network:
            await self._network.aclose()


def too_large(max_body_bytes: int) -> Reply:
    message = f"the request is larger than rollout.agent.max_body_bytes, {max_body_bytes}"
    return Reply(413, f'{{"error": {{"message": "{message}", "type": "invalid_request_error"}}}}'.encode())


def write_admin_key(port: int, admin_key: str) -> Path:
    """Write the key of the proxy at a port into a file that only this user can read."""
    folder = Path(default_root())
    make_private(folder)
    file = folder / f"agent_admin_key_{port}"
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as new:
        new.write(admin_key)
    return file


def check_exposure(host: str, admin_key: str) -> None:
    """Raise UnsafeProxy if other machines could reach a proxy with a guessable key."""
    if is_loopback(host):
        return
    if admin_key == KNOWN_ADMIN_KEY or len(admin_key) < SHORTEST_ADMIN_KEY:
        kind = "AReaL's default" if admin_key == KNOWN_ADMIN_KEY else f"only {len(admin_key)} characters long"
        raise UnsafeProxy(
            f"the agent proxy would listen on {host}, where other machines reach it, and rollout.agent.admin_api_key is "
            f"{kind}: set one of at least {SHORTEST_ADMIN_KEY} characters, leave it empty for a random one, or set "
            "rollout.agent.host to 127.0.0.1"
        )
