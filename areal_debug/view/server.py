"""Serve the page on this machine; it shows steps as they are recorded.

browser                          server (a thread a request)              record
GET /                ----------> the page, without a step
GET /run.json?41     every 2 s > reads new steps <---------------- a running recorder commits them
                                 204 while 41 is the last one
GET /blob/a-42-text  ----------> reads and packs

Pages of other sites must not read a record through a browser on this machine: a request that names
another host is refused.
"""

import http.server
import json
import re
import sys
from http import HTTPStatus
from typing import Any

from areal_core.safety.http_requests import refusal_of
from areal_debug.render import note
from areal_debug.view.contents import BLOB_NAME, Contents, Place
from areal_debug.view.page import served_page
from recorder import RecordError

RUN_PATH = re.compile(r"/run\.json(?:\?([0-9]{1,18}))?")


class PageServer(http.server.ThreadingHTTPServer):
    """A server whose failed requests are one line on standard error; a browser that leaves none."""

    def handle_error(self, *_: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError):
            note(f"a request of the page failed: {type(error).__name__}: {error}")


def make_server(contents: Contents, port: int, opens: Place | None = None) -> PageServer:
    """Make a server at `127.0.0.1:port` that is not yet serving; port 0 takes any free one."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if refusal := refusal_of(self.command, self.headers, "127.0.0.1"):
                self.answer(HTTPStatus(refusal.status), refusal.reason.encode())
            elif self.path == "/":
                page = served_page(contents.document(None, opens))
                self.answer(HTTPStatus.OK, page, "text/html; charset=utf-8")
            elif found := RUN_PATH.fullmatch(self.path):
                self.answer_run(found[1])
            elif found := BLOB_NAME.fullmatch(self.path.removeprefix("/blob/")):
                self.answer_blob(found[0])
            else:
                self.answer(HTTPStatus.NOT_FOUND, b"no such page")

        def answer_run(self, last: str | None) -> None:
            document = contents.document(None, opens)
            if last is not None and document["stored"][-1:] == [int(last)]:
                self.answer(HTTPStatus.NO_CONTENT, b"")
            else:
                self.answer(HTTPStatus.OK, json.dumps(document, allow_nan=False).encode(), "application/json")

        def answer_blob(self, name: str) -> None:
            try:
                self.answer(HTTPStatus.OK, contents.blob(name), "application/octet-stream")
            except RecordError as error:
                self.answer(HTTPStatus.NOT_FOUND, str(error).encode())

        def answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
            self.send_response(status)
            for name, value in (
                ("Content-Type", kind),
                ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"),
                ("X-Content-Type-Options", "nosniff"),
                ("Cross-Origin-Resource-Policy", "same-origin"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing: the terminal is for the user."""

    return PageServer(("127.0.0.1", port), Handler)
