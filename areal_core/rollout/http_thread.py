"""A web application that is served from a thread, for the calls of other threads and processes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from areal_core.rollout.loop_thread import LoopThread
from areal_core.safety.http_requests import refusal_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def refuse_web_pages(application: web.Application, listens_at: str) -> None:
    """Let an application refuse requests that a web page could make a browser send.

    The reason is in the form of the OpenAI API, and of the routes of SGLang.
    """

    @web.middleware
    async def refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = refusal_of(request.method, request.headers, listens_at)
        if refusal is None:
            return await handler(request)
        error = {"message": refusal.reason, "type": "invalid_request_error"}
        body = {"success": False, "message": refusal.reason, "error": error}
        return web.json_response(body, status=refusal.status)

    application.middlewares.insert(0, refuse)
    logging.getLogger("aiohttp.server").addFilter(  # a request that is no HTTP is its client's fault
        lambda entry: not (entry.exc_info and isinstance(entry.exc_info[1], HttpProcessingError))
    )


class HttpThread:
    """An aiohttp application that listens in its own thread until it is closed.

    It refuses requests of web pages (`areal_core/safety/http_requests.py`).

    Args:
        application: its routes.
        name: of the thread.
        host: address of the interface.
        port: 0 for a free one.
        backlog: connections that may wait to be accepted.

    Attributes:
        port: the port that it listens on.
        thread: where the handlers run.

    Raises:
        OSError: the port is in use, or the interface is not of this machine.
    """

    def __init__(
        self,
        application: web.Application,
        name: str,
        host: str = "127.0.0.1",
        port: int = 0,
        backlog: int = 128,
    ) -> None:
        self.thread = LoopThread(name)
        refuse_web_pages(application, host)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        try:
            self._listener = self.thread.run(self._listen(host, port, backlog))
        except OSError:
            self.thread.run(self._runner.cleanup())
            self.thread.close()
            raise
        self.port: int = self._listener.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Stop listening, end the handlers in flight, and end the thread; again without effect."""
        if not self.thread.loop.is_closed():
            self.thread.run(self._stop())
            self.thread.close()

    async def _listen(self, host: str, port: int, backlog: int) -> asyncio.Server:
        await self._runner.setup()
        assert self._runner.server is not None
        loop = asyncio.get_running_loop()
        return await loop.create_server(self._runner.server, host, port, backlog=backlog)

    async def _stop(self) -> None:
        # asyncio (3.11) never closes a connection that is accepted, but not attached to its server
        # before that closes: accept no more, and let the accepted ones attach.
        for listening in self._listener.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        await asyncio.sleep(0)
        self._listener.close()
        await self._runner.cleanup()
