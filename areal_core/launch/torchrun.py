"""Run a script on ranks of this machine under torchrun, without importing torch, to start faster.

this thread                                  torchrun -> ranks
every 0.2 s: ended?  still healthy?          output -> pipe
copying thread: pipe -> log (and our output)
any exit (end, error, SIGTERM, SIGINT): every child is ended, by SIGKILL after a grace period or a
second signal
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, BinaryIO

from areal_core.launch.node import RANK_LOGS
from areal_core.launch.processes import end_tree, hurry, start, thread_limits
from areal_core.safety.durable import disk_errors_as_warnings, write_all
from areal_core.safety.interpreter import python_command

GRACE_S = 30.0
POLL_S = 0.2


@dataclass(frozen=True)
class Nodes:
    """The machines that ranks run on: their number, and the address and port of the first one."""

    count: int
    address: str
    port: int


def run_ranks(
    script_argv: Sequence[str],
    num_ranks: int,
    env: Mapping[str, str],
    log_dir: Path,
    healthy: Callable[[], bool] = lambda: True,
    echo: bool = True,
    python: Sequence[str] = (),
) -> int:
    """Run a script (or `-m module`), under torchrun if on several ranks.

    Its output goes to `log_dir/trainer.log` and, if `echo`, to standard output. `healthy` is called
    periodically; the ranks are ended `GRACE_S` after it returns False. `python`: of `rank_command`.

    Returns:
        The exit code of the first rank that failed, 0 when none did.
    """
    return run_command(
        rank_command(script_argv, num_ranks, python=python),
        rank_environment(env, log_dir),
        log_dir / "trainer.log",
        healthy,
        echo,
    )


def rank_command(
    script_argv: Sequence[str],
    ranks_per_node: int,
    nodes: Nodes | None = None,
    python: Sequence[str] = (),
) -> list[str]:
    """Return the command that runs a script on the ranks of one node.

    It is the only node or, with `nodes`, one of several, whose index is PET_NODE_RANK or
    SLURM_PROCID. `python` runs the script of each rank; by default it is this interpreter.
    """
    command = python_command(*script_argv, python=python)
    # A single rank needs no agent, whose start takes as long as its own.
    if nodes is None and ranks_per_node == 1:
        return command
    where = ["--standalone", "--local-addr", "127.0.0.1"]
    if nodes is not None:
        where = [
            "--nnodes",
            str(nodes.count),
            "--master-addr",
            nodes.address,
            "--master-port",
            str(nodes.port),
        ]
    agent = python_command("-m", "areal_core.launch.node", *where)
    return [*agent, "--nproc-per-node", str(ranks_per_node), "--no-python", *command]


def rank_environment(env: Mapping[str, str], log_dir: Path) -> dict[str, str]:
    """Return the environment of `rank_command`, changed by `env`; remove earlier rank logs."""
    rank_logs = log_dir / "ranks"
    shutil.rmtree(rank_logs, ignore_errors=True)
    return {**thread_limits(1), **terminal_environment(), RANK_LOGS: str(rank_logs), **env}


def run_command(
    command: list[str],
    env: Mapping[str, str],
    log: Path,
    healthy: Callable[[], bool] = lambda: True,
    echo: bool = True,
) -> int:
    """Run a command to its end; `log`, `echo` and `healthy` as in `run_ranks`.

    Returns:
        The exit code as a shell would show it: 128 and the number for a signal.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with ended_on_signals(), log.open("wb", buffering=0) as file:
        process = start(command, env, subprocess.PIPE)
        assert process.stdout is not None
        copying = threading.Thread(target=copy_output, args=(process.stdout, file, echo), daemon=True)
        copying.start()
        try:
            return wait_for(partial(poll, process), healthy)
        finally:
            end_tree(process)
            copying.join()
            process.stdout.close()


def wait_for(poll: Callable[[], int | None], healthy: Callable[[], bool]) -> int:
    """Call `poll` until it returns an exit code; return 1 `GRACE_S` after `healthy` returned False.

    `poll` waits for a moment and returns None while the process runs.
    """
    deadline = None
    while True:
        if (code := poll()) is not None:
            return code
        if deadline is None and not healthy():
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            return 1


def poll(process: subprocess.Popen[bytes]) -> int | None:
    """Wait a moment for the end of a process; return its exit code, or None while it runs."""
    try:
        return shell_code(process.wait(POLL_S))
    except subprocess.TimeoutExpired:
        return None


def shell_code(code: int) -> int:
    """Return an exit code as a shell shows it; print the signal by which a process was killed."""
    if code >= 0:
        return code
    print(f"killed by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
    return 128 - code


def copy_output(source: BinaryIO, log: IO[bytes], echo: bool) -> None:
    """Copy bytes as they arrive, to the log and, if `echo`, to standard output.

    A log that cannot be written gets no more: ranks whose output nobody reads would wait.
    """
    logs = True
    while chunk := os.read(source.fileno(), 65536):
        if logs:
            logs = False
            with disk_errors_as_warnings("the log of the ranks ends here"):
                write_all(log, chunk)
                logs = True
        if echo:
            try:
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
            except BrokenPipeError:  # the reader of our output is gone; the ranks continue
                echo = False


def terminal_environment() -> dict[str, str]:
    """Return variables that describe the terminal to the ranks, which write to a pipe."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return {}
    return {"FORCE_COLOR": "1", "COLUMNS": str(os.get_terminal_size(sys.stdout.fileno()).columns)}


ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def ended_on_signals() -> Iterator[None]:
    """Turn signals that end this process into `SystemExit(128 + number)`, for `finally` to run.

    A second signal ends them without a grace period. A signal that was ignored (SIGHUP under nohup)
    stays ignored. Inside of another such context it does nothing.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is _leave
    ):
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _leave)
    _received.clear()
    hurry.clear()
    try:
        yield
    except SystemExit:
        if _received:  # Ray turns the code into 1 when the signal arrives while it waits
            raise SystemExit(128 + _received[0]) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_received: list[int] = []


def _leave(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    for ending in ENDING:
        signal.signal(ending, lambda number, frame: hurry.set())
    raise SystemExit(128 + number)
