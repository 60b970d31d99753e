"""Connections from an event loop to inference servers: one session per server."""

from typing import Any

import aiohttp

from areal_core.rollout.errors import RequestRefused
from areal_core.rollout.servers import MESSAGE_LIMIT, Server

READ_BUFFER_BYTES = 10 * 1024 * 1024
CONNECT_TIMEOUT_S = 30.0


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
