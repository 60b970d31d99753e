"""Serve the page on this machine; it shows steps as they are recorded.

browser                          server (a thread a request)              record
GET /                ----------> the page, without a step
GET /run.json?41     every 2 s > reads new steps <---------------- a running recorder commits them
                                 204 while 41 is the last one
GET /blob/a-42-text  ----------> reads and packs
"""

import json
import re
from http import HTTPStatus

from areal_debug.report.local import LocalHandler, LocalServer, listen
from areal_debug.view.contents import BLOB_NAME, Contents, Place
from areal_debug.view.page import served_page
from recorder import RecordError

RUN_PATH = re.compile(r"/run\.json(?:\?([0-9]{1,18}))?")


def make_server(contents: Contents, port: int, opens: Place | None = None) -> LocalServer:
    """Make a server at `127.0.0.1:port` that is not yet serving; port 0 takes any free one."""

    class Handler(LocalHandler):
        def reply(self, path: str) -> None:
            if path == "/":
                page = served_page(contents.document(None, opens))
                self.answer(HTTPStatus.OK, page, "text/html; charset=utf-8")
            elif found := RUN_PATH.fullmatch(path):
                self.answer_run(found[1])
            elif found := BLOB_NAME.fullmatch(path.removeprefix("/blob/")):
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

    return listen(Handler, port)
