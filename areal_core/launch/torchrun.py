"""Runs a script on ranks of this machine under torchrun. Imports no torch itself: a replay starts faster for it.

this thread                                  torchrun -> ranks
every 0.2 s: ended?  still healthy?          output -> pipe
copying thread: pipe -> log (and our output)
any way out (end, error, SIGTERM, SIGINT): every child is ended
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from areal_core.launch.processes import end_tree, start, thread_limits

GRACE_S = 30.0
POLL_S = 0.2


def run_ranks(
    script_argv: Sequence[str],
    num_ranks: int,
    env: Mapping[str, str],
    log_dir: Path,
    healthy: Callable[[], bool] = lambda: True,
    echo: bool = True,
) -> int:
    """Runs a script (or `-m module`), under torchrun if on several ranks; its output goes to `log_dir/trainer.log`, and to ours if `echo`.

    `healthy` is asked now and then; the ranks are ended `GRACE_S` after it says no.

    Returns:
        The exit code of the first rank that failed, 0 when none did.
    """
    command = [sys.executable, *script_argv]
    if num_ranks > 1:  # a rank alone needs no agent, whose start takes as long as its own
        agent = [sys.executable, "-m", "areal_core.launch.ranks", "--standalone", "--local-addr", "127.0.0.1"]
        command = [*agent, "--nproc-per-node", str(num_ranks), *script_argv]
    log_dir.mkdir(parents=True, exist_ok=True)
    with ended_on_signals(), (log_dir / "trainer.log").open("wb") as log:
        ranks = start(command, {**thread_limits(1), **terminal_environment(), **env}, subprocess.PIPE)
        copying = threading.Thread(target=copy_output, args=(ranks.stdout, log, echo), daemon=True)
        copying.start()
        try:
            return wait_for_ranks(ranks, healthy)
        finally:
            end_tree(ranks)
            copying.join()
            ranks.stdout.close()


def wait_for_ranks(ranks: subprocess.Popen[bytes], healthy: Callable[[], bool]) -> int:
    """The exit code of torchrun; 1 when it had to be ended because `healthy` said no."""
    deadline = None
    while True:
        try:
            code = ranks.wait(POLL_S)
            return code if code >= 0 else 128 - code  # a negative code is a signal's number
        except subprocess.TimeoutExpired:
            pass
        if deadline is None and not healthy():
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            return 1


def copy_output(source: BinaryIO, log: BinaryIO, echo: bool) -> None:
    """Copies bytes as they come, to the log and, if `echo`, to our standard output."""
    while chunk := os.read(source.fileno(), 65536):
        log.write(chunk)
        log.flush()
        if echo:
            try:
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
            except BrokenPipeError:  # whoever read us has left; the ranks must not notice
                echo = False


def terminal_environment() -> dict[str, str]:
    """Tells the ranks, which write to a pipe, of the terminal that we copy to."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return {}
    return {"FORCE_COLOR": "1", "COLUMNS": str(os.get_terminal_size(sys.stdout.fileno()).columns)}


@contextmanager
def ended_on_signals() -> Iterator[None]:
    """Turns SIGTERM into an exception (SIGINT is one already), so that `finally` ends the children."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
