"""Streamable HTTP on loopback: every address begins with a key, as those of served pages do."""

import secrets
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from mcp.server import Server
from starlette.responses import PlainTextResponse

from areal_debug.report.local import HOST

GRACE_S = 2  # for open connections, after an interrupt


def listen(port: int) -> socket.socket:
    """Return a socket on loopback; port 0 takes any free one. Raises ValueError."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
        listening.listen()  # a client may connect before the server is ready
    except OSError as error:
        listening.close()
        raise ValueError(f"cannot listen on port {port}: {error.strerror}; choose another --port") from error
    return listening


def serve(server: Server[Any], port: int, announce: Callable[[str], None]) -> None:
    """Serve until interrupted; `announce` gets the address, with its key."""
    top = f"/{secrets.token_urlsafe(24)}/"
    app = server.streamable_http_app(streamable_http_path=f"{top}mcp", host=HOST)

    async def with_key(scope: Any, receive: Any, send: Any) -> None:
        is_request = scope["type"] == "http"
        if is_request and not secrets.compare_digest(scope["path"][: len(top)].encode(), top.encode()):
            refused = PlainTextResponse("use the complete address, with its key, as it was printed", 403)
            await refused(scope, receive, send)
        else:
            await app(scope, receive, send)

    with listen(port) as listening:
        announce(f"http://{HOST}:{listening.getsockname()[1]}{top}mcp")
        config = uvicorn.Config(
            with_key, lifespan="on", log_config=None, access_log=False, timeout_graceful_shutdown=GRACE_S
        )
        uvicorn.Server(config).run(sockets=[listening])
