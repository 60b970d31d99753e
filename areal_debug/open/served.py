"""Serve a workbench on this machine; its pages are written again after the run has changed.

browser                    server                                   child process
GET /      ------------->  has the run changed? ---- if so ---->    areal-debug open RUN -o FOLDER
GET /*     ------------->  a file of FOLDER

The server reads names, sizes and times of the run's files; the confined child parses them.
"""

import subprocess
import tempfile
import threading
from http import HTTPStatus
from pathlib import Path

from areal_core.safety.interpreter import python_command
from areal_debug.open.find import fingerprint
from areal_debug.render import console, fail, styled
from areal_debug.report.local import LocalHandler, LocalServer, listen
from areal_debug.waiting import leave_terminal

KINDS = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8"}


class Workbench:
    """The pages of a run in a folder, for several threads."""

    def __init__(self, run: Path, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._lock = threading.Lock()
        self._written: list[tuple[str, int, int]] | None = None
        self._files: dict[str, Path] = {}
        self.problem = ""

    def refresh(self) -> None:
        """Write the pages if the run has changed since; `problem` is why that failed, or empty."""
        with self._lock:
            now = fingerprint(self._run)
            if now == self._written:
                return
            asked = ("open", str(self._run), "-o", str(self._folder), "--force", "--quiet")
            command = python_command("-m", "areal_debug", *asked)
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            self.problem = done.stderr.strip() if done.returncode else ""
            self._written = now
            files = [file for file in self._folder.rglob("*") if file.is_file()]
            self._files = {f"/{file.relative_to(self._folder).as_posix()}": file for file in files}

    def file(self, path: str) -> Path | None:
        """Return the file of an address; only what was written can be found."""
        with self._lock:
            return self._files.get("/index.html" if path == "/" else path)


def serve_workbench(run: Path, port: int) -> None:
    """Serve until interrupted."""
    with tempfile.TemporaryDirectory(prefix="areal-debug-") as folder:
        workbench = Workbench(run, Path(folder) / "workbench")
        workbench.refresh()
        if workbench.problem:
            fail(workbench.problem.removeprefix("Error: "))
        with make_server(workbench, port) as server:
            console().print(
                styled("{} at {} (Ctrl-C ends it; -o FOLDER writes the pages and ends)", run, server.address)
            )
            leave_terminal()
            server.serve_until_interrupted()


def make_server(workbench: Workbench, port: int) -> LocalServer:
    """Make a server at 127.0.0.1 that is not yet serving; port 0 takes any free one."""

    class Handler(LocalHandler):
        def reply(self, path: str) -> None:
            if path in ("/", "/index.html"):
                workbench.refresh()
            if workbench.problem:
                self.answer(HTTPStatus.INTERNAL_SERVER_ERROR, workbench.problem.encode())
            elif (file := workbench.file(path)) is None:
                self.answer(HTTPStatus.NOT_FOUND, b"no such page")
            else:
                self.answer(HTTPStatus.OK, file.read_bytes(), KINDS.get(file.suffix, "text/plain"))

    return listen(Handler, port)
