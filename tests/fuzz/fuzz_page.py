"""Requests to the server of the page that follows a record."""

import contextlib
import random
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from areal_debug.view.page import Contents, FollowedRecord, make_server
from recorder.testing import write_scripted_record

from .inputs import Case, Edit, Files
from .targets import Target


def page_bases(folder: Path) -> dict[str, Files]:
    host = "Host: 127.0.0.1:8000\r\nConnection: close\r\n\r\n"
    return {
        path: {"request": f"GET {path} HTTP/1.1\r\n{host}".encode()}
        for path in ("/", "/run.json", "/blob/a-1-text")
    }


def page_edit(chance: random.Random) -> Edit:
    path = chance.choice(
        [
            "/blob/a-" + "9" * 6000,
            "/blob/a-1-text?x",
            "/blob/a-٣-text",
            "/blob/pair-1",
            "/..",
            "//",
            "/run.json/",
            "*",
        ]
    )
    host = chance.choice(
        ["127.0.0.1", "localhost", "evil.example", "127.0.0.1.evil.example", "[::1]", "", "localhost:x"]
    )
    method = chance.choice(["GET", "GET", "POST", "HEAD", "OPTIONS"])
    origin = chance.choice(
        ["", "Origin: http://evil.example\r\n", "Content-Length: 5\r\n", "Host: evil.example\r\n"]
    )
    request = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{origin}Connection: close\r\n\r\n"
    return ["file", "request", request.encode().decode("latin-1")]


class Page:
    """A server of the page of a small record, started once a process."""

    _made: "Page | None" = None

    def __init__(self, folder: Path) -> None:
        write_scripted_record(folder, num_steps=2, num_rows=2)
        self.server = make_server(Contents(FollowedRecord(str(folder), None)), 0)
        self.failures: list[BaseException] = []
        self.server.handle_error = self.keep  # type: ignore[method-assign]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def keep(self, request: Any, address: Any) -> None:
        failure = sys.exception()
        if failure is not None and not isinstance(failure, ConnectionError):
            self.failures.append(failure)

    @classmethod
    def once(cls, folder: Path) -> "Page":
        cls._made = cls._made or cls(folder)
        return cls._made


def run_page(case: Case, box: Path) -> None:
    """A foreign host gets nothing of the record; nothing fails in the thread of a request."""
    page = Page.once(box.parent / "page")
    page.failures.clear()
    request = case.files["request"]
    with socket.create_connection(("127.0.0.1", page.server.server_port), timeout=9) as connection:
        reply = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            while received := connection.recv(1 << 16):
                reply += received
    if page.failures:
        raise page.failures[0]
    assert not (b"evil.example" in request.split(b"\r\n\r\n")[0] and b"cu_seqlens" in reply)


TARGETS = {"page": Target(page_bases, run_page, (), page_edit)}
