"""HTTP of one event loop: one bounded pool of connections to all servers."""

import asyncio
import errno
import resource
from collections import defaultdict
from email.utils import parsedate_to_datetime
from time import time
from typing import Any

import aiohttp

from areal_core.rollout.errors import RequestRefused
from areal_core.servers.server import MESSAGE_LIMIT, Server

READ_BUFFER_BYTES = 10 * 1024 * 1024
CONNECT_TIMEOUT_S = 30.0
MOST_DESCRIPTORS = 65536  # enough for every request in flight of one process
OTHER_DESCRIPTORS = 256  # files, pipes and sockets of this process that are not connections
# Errors of this process, not of the server: no file descriptor, no local port, no memory.
OWN_ERRORS = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}


class Connections:
    """Persistent connections to all servers; further requests wait for one that is free.

    Args:
        timeout_s: maximum seconds for one request.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._open: defaultdict[Server, set[asyncio.Timeout]] = defaultdict(set)
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            read_bufsize=READ_BUFFER_BYTES,
            connector=aiohttp.TCPConnector(limit=num_connections()),
        )

    async def post(self, server: Server, path: str, payload: dict[str, Any]) -> bytes:
        """Return the body of a 200 reply.

        Raises:
            RequestRefused: another status.
            aiohttp.ClientError, TimeoutError: no connection, or no complete reply in time.
        """
        async with asyncio.timeout(self._timeout_s) as scope:
            self._open[server].add(scope)
            try:
                async with self._session.post(f"http://{server.address}{path}", json=payload) as reply:
                    return await body_of(server, path, reply)
            finally:
                self._open[server].discard(scope)

    async def get(self, server: Server, path: str, timeout_s: float) -> bytes:
        """Return the body of a 200 reply. Raises as `post` does."""
        async with (
            asyncio.timeout(timeout_s),
            self._session.get(f"http://{server.address}{path}") as reply,
        ):
            return await body_of(server, path, reply)

    def hang_up(self, server: Server) -> None:
        """Abort the requests that wait for a server, with a `TimeoutError`."""
        for scope in self._open[server]:
            if not scope.expired():
                scope.reschedule(0.0)

    async def close(self) -> None:
        """Abort every request and close all connections."""
        for server in self._open:
            self.hang_up(server)
        await self._session.close()


async def body_of(server: Server, path: str, reply: aiohttp.ClientResponse) -> bytes:
    body = await reply.read()
    if reply.status == 200:
        return body
    message = (
        f"{server.address}{path} answered {reply.status}: {body[:MESSAGE_LIMIT].decode(errors='replace')}"
    )
    raise RequestRefused(message, reply.status, parse_retry_after(reply.headers.get("Retry-After", "")))


def parse_retry_after(text: str) -> float | None:
    """Return the seconds of a Retry-After header, a number or a date; None if it is neither."""
    try:
        return max(
            0.0, float(text) if text.strip().isdecimal() else parsedate_to_datetime(text).timestamp() - time()
        )
    except (TypeError, ValueError):
        return None


def num_connections() -> int:
    """Raise the soft limit of file descriptors to the hard one; return how many may be connections.

    Half of them: a connection that waits to be used again has a descriptor, too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    free = most if soft == resource.RLIM_INFINITY else soft
    return max(1, (free - min(OTHER_DESCRIPTORS, free // 2)) // 2)


def is_own_error(error: BaseException) -> bool:
    """Return whether a connection failed for a limit of this process or machine."""
    return isinstance(error, OSError) and error.errno in OWN_ERRORS
