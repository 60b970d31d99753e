"""A server of pages on this machine.

Pages of other sites must not read a run through a browser on this machine: a request that names
another host or comes from another site is refused. Nor may other users of it, who reach the port
too: every address begins with a random key, which only the user is shown.
"""

import http.server
import secrets
import sys
from http import HTTPStatus
from typing import Any

from areal_core.safety.http_requests import refusal_of
from areal_debug.render import note

HOST = "127.0.0.1"
HEADERS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),  # it would have the key
)


class LocalServer(http.server.ThreadingHTTPServer):
    """A server whose failed requests are one line on standard error; a browser that leaves none."""

    def __init__(self, port: int, handler: type["LocalHandler"]) -> None:
        self.top = f"/{secrets.token_urlsafe(24)}/"
        super().__init__((HOST, port), handler)

    @property
    def address(self) -> str:
        """Address of the first page, with the key."""
        return f"http://{HOST}:{self.server_port}{self.top}"

    def serve_until_interrupted(self) -> None:
        try:
            self.serve_forever()
        except KeyboardInterrupt:
            note("ended")

    def handle_error(self, *_: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError):
            note(f"a request of the page failed: {type(error).__name__}: {error}")


class LocalHandler(http.server.BaseHTTPRequestHandler):
    """Answers requests of pages of ours; a subclass has `reply`."""

    server: LocalServer

    def do_GET(self) -> None:
        top = self.server.top
        if refusal := refusal_of(self.command, self.headers, HOST):
            self.answer(HTTPStatus(refusal.status), refusal.reason.encode())
        elif not secrets.compare_digest(self.path[: len(top)].encode(), top.encode()):
            self.answer(HTTPStatus.FORBIDDEN, b"open the complete address, with its key, as it was printed")
        else:
            self.reply(self.path[len(top) - 1 :])

    def reply(self, path: str) -> None:
        """Answer a request for a path below the key."""
        raise NotImplementedError

    def answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        """Send a complete answer."""
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *HEADERS):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the terminal is for the user."""


def listen(handler: type[LocalHandler], port: int) -> LocalServer:
    """Make a server that is not yet serving. Raises ValueError if the port cannot be had."""
    try:
        return LocalServer(port, handler)
    except OSError as error:
        raise ValueError(f"cannot listen on port {port}: {error.strerror}; choose another --port") from error
