"""Serve the page on this machine; it shows steps as they are recorded.

browser                          server (a thread a request)              record
GET /           ---------------> the page, without a step
GET /run.json   every 2 s -----> reads new steps <---------------- a running recorder commits them
GET /step/42    ---------------> reads, packs, caches the last few

Pages of other sites must not read a record through a browser on this machine: a request that names
another host is refused.
"""

import http.server
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from areal_core.safety.http_requests import refusal_of
from areal_debug.render import note
from areal_debug.view.data import (
    MAX_CURVE_STEPS,
    RunView,
    curves_of,
    read_run,
    read_step,
    redacted_run,
    run_json,
    step_point,
)
from areal_debug.view.pack import pack_step
from areal_debug.view.page import served_page
from areal_debug.view.text import Decode
from recorder import RecordError, open_record

KEPT_STEPS = 4
STEP_PATH = re.compile(r"/step/([0-9]{1,18})")


class FollowedRecord:
    """A record that may be growing. Reads the curve values of each step once.

    Args:
        path: path of the record.
        decode: decodes token ids, or None.
        patterns: what to redact.
    """

    def __init__(self, path: str, decode: Decode | None, patterns: Sequence[re.Pattern[str]]) -> None:
        self._path, self._decode, self._patterns = path, decode, patterns
        self._lock = threading.Lock()
        self._run = redacted_run(read_run(open_record(path)), patterns)
        self._points = {step: point_at(self._run, place) for place, step in enumerate(self._run.steps)}
        self._packed: OrderedDict[int, bytes] = OrderedDict()

    def run(self) -> RunView:
        """Return the run with the steps recorded so far."""
        with self._lock:
            record = open_record(self._path)
            new = [step for step in record.steps if step > max(self._points, default=-1)]
            for step in new:
                self._points[step] = step_point(record.step(step), lambda _: None)
            steps = list(self._points)[-MAX_CURVE_STEPS:]
            curves = curves_of([self._points[step] for step in steps])
            self._run = replace(self._run, steps=steps, curves=curves, num_steps=len(record.steps))
            return self._run

    def step(self, step: int) -> bytes:
        """Return a packed step. Raises `RecordError`."""
        with self._lock:
            if step not in self._packed:
                record = open_record(self._path)
                view = read_step(record.step(step), self._decode, self._patterns, record.header.trainer)
                self._packed[step] = pack_step(view)
                if len(self._packed) > KEPT_STEPS:
                    self._packed.popitem(last=False)
            self._packed.move_to_end(step)
            return self._packed[step]


def point_at(run: RunView, place: int) -> dict[str, float]:
    """Return a step's value on every curve of a run."""
    return {name: values[place] for name, values in run.curves.items()}


class PageServer(http.server.ThreadingHTTPServer):
    """A server whose failed requests are one line on standard error; a browser that leaves none."""

    def handle_error(self, *_: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError):
            note(f"a request of the page failed: {type(error).__name__}: {error}")


def make_server(followed: FollowedRecord, port: int) -> PageServer:
    """Make a server at `127.0.0.1:port` that is not yet serving; port 0 takes any free one."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if refusal := refusal_of(self.command, self.headers, "127.0.0.1"):
                self.answer(HTTPStatus(refusal.status), refusal.reason.encode())
            elif self.path == "/":
                self.answer(HTTPStatus.OK, served_page(followed.run()).encode(), "text/html; charset=utf-8")
            elif self.path == "/run.json":
                self.answer(HTTPStatus.OK, run_json(followed.run()).encode(), "application/json")
            elif found := STEP_PATH.fullmatch(self.path):
                self.answer_step(int(found[1]))
            else:
                self.answer(HTTPStatus.NOT_FOUND, b"no such page")

        def answer_step(self, step: int) -> None:
            try:
                self.answer(HTTPStatus.OK, followed.step(step), "application/octet-stream")
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
