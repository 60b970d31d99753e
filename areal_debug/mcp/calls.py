"""Answer a call by a verb in a child process of its own session, which ends with the call.

    client           server                                      in_child.py
    tools/call --->  takes a spare child, which has imported     waits for one line
                     what every verb needs ---- request ------>  gives up rights, runs the verb
    progress   <---  reads its page of progress every 0.5 s  <-  says what it does
    cancelled  --->  SIGTERM, then SIGKILL to the session ---->  ends, with what it started
    result     <---  JSON of standard output, exit code <------  exits

The child waits for the server only at its start; the server waits for the child's end and for both
of its streams. A new spare starts when a call has ended, so that it takes no core from it.
"""

import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
from anyio.abc import ByteReceiveStream, Process

from areal_core.safety.interpreter import python_command
from areal_debug.mcp.outcome import Outcome, printed_outcome
from areal_debug.mcp.roots import Roots
from areal_debug.waiting import PROGRESS_FILE, Page, make_page, read_page

GRACE_S = 3.0
PROGRESS_EVERY_S = 0.5
MOST_CALLS = 4  # at a time, of all clients
MOST_OUTPUT = 16 << 20  # bytes of a report
Report = Callable[[float, str], Awaitable[None]]  # seconds, and what is done


class Children:
    """The children of a server; `close` ends the spare one."""

    def __init__(self, roots: Roots) -> None:
        self.roots = roots
        self.limiter = anyio.CapacityLimiter(MOST_CALLS)
        self.spare: Process | None = None

    async def prepare(self) -> None:
        """Start a spare child, unless there is one."""
        if self.spare is None:
            self.spare = await self.start()

    async def start(self) -> Process:
        command = python_command("-m", "areal_debug.mcp.in_child")
        return await anyio.open_process(command, cwd=self.roots.folders[0], start_new_session=True)

    async def close(self) -> None:
        spare, self.spare = self.spare, None
        if spare is not None:
            await end(spare)

    async def run(
        self, argv: Sequence[str], confined: bool, report: Report, page: str = "", imports: Sequence[str] = ()
    ) -> Outcome:
        """Run a verb; its end, or the cancellation of this call, is the end of all it started.

        Args:
            confined: it may read the roots, and start nothing and reach no network.
            page: name of a file that it may write, for the option --output.
            imports: modules to import before it is confined.
        """
        async with self.limiter:
            spare, self.spare = self.spare, None
            child = spare if spare is not None and spare.returncode is None else await self.start()
            try:
                with TemporaryDirectory(prefix="areal-debug-mcp-") as folder:
                    written = Path(folder, page)
                    output = [f"--output={written}"] if page else []
                    request = {
                        "argv": [argv[0], *output, *argv[1:]],
                        "confined": confined,
                        "imports": imports,
                    }
                    request |= {"roots": [str(root) for root in self.roots.folders], "scratch": folder}
                    return await follow(child, request, Path(folder), report, written if page else None)
            finally:
                await end(child)
                with anyio.CancelScope(shield=True):
                    await self.prepare()


async def follow(
    child: Process, request: Mapping[str, Any], folder: Path, report: Report, written: Path | None
) -> Outcome:
    """Send the request; return what the verb printed and wrote."""
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    make_page(folder / PROGRESS_FILE)
    streams: dict[str, bytes] = {}  # those that have ended
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read_stream, child.stdout, "out", streams)
        tasks.start_soon(read_stream, child.stderr, "error", streams)
        tasks.start_soon(tell, folder / PROGRESS_FILE, report)
        with suppress(anyio.BrokenResourceError):  # it has ended: its streams say why
            await child.stdin.send(json.dumps(request).encode() + b"\n")
        code = await child.wait()
        signalled(child, signal.SIGKILL)  # whatever it left would keep the streams open
        with anyio.move_on_after(GRACE_S):
            while len(streams) < 2:
                await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    file = written / "index.html" if written is not None and written.is_dir() else written
    page = file.read_text(errors="replace") if file is not None and file.is_file() else ""
    return outcome_of(code, streams, None if written is None else page)


async def read_stream(stream: ByteReceiveStream, name: str, found: dict[str, bytes]) -> None:
    """Read a stream to its end, or to `MOST_OUTPUT`, after which it is drained."""
    data = b""
    async for block in stream:
        if len(data) <= MOST_OUTPUT:
            data += block
    found[name] = data


async def tell(file: Path, report: Report) -> None:
    """Report what the child does, until cancelled."""
    started_at = time.monotonic()
    while True:
        await anyio.sleep(PROGRESS_EVERY_S)
        await report(round(time.monotonic() - started_at, 1), said(read_page(file)))


def said(page: Page) -> str:
    count = f": {page.done:,} of {page.total:,}" if page.total else ""
    return page.text.decode(errors="replace") + count


def outcome_of(code: int, streams: Mapping[str, bytes], page: str | None) -> Outcome:
    """Return the report of a verb or the page that it wrote, or the sentence that ended it."""
    out, error = (
        streams[name].decode(errors="replace") if name in streams else "" for name in ("out", "error")
    )
    if len(out) > MOST_OUTPUT:
        return Outcome(
            2, error=f"the report is larger than {MOST_OUTPUT >> 20} MiB: ask for less, or with a limit"
        )
    return Outcome(code, report=page) if page else printed_outcome(code, out, error)


async def end(child: Process) -> None:
    """End a child and its session, whether or not it runs; nothing of it is left."""
    with anyio.CancelScope(shield=True):
        if child.returncode is None:
            signalled(child, signal.SIGTERM)
            with anyio.move_on_after(GRACE_S):
                await child.wait()
        signalled(child, signal.SIGKILL)
        await child.aclose()


def signalled(child: Process, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)
