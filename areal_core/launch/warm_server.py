"""Run Python programs in forks of one process that has imported their libraries.

    python warm_server.py CHANNEL     an open socket
      <- {"modules": [...], "path": [...], "umask": N}  imports them once, by one thread
      -> {"ready": 1}        the next message may come
      <- {"argv": [...], "num_ranks": N, "environment": {...}, "place": ...}, and standard streams
      fork ─> rank 0, 1, ...  each runs `argv` in `place` as `python argv` would
      -> {"code": 0}          or the exit code of the first rank that failed, as of `subprocess`

It is started by its path and imports nothing of ours by itself, so that a fork may import the code
of another commit. `warm.py` is the other side.
"""

import atexit
import ctypes
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TextIO

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <sys/prctl.h>
MOST_BYTES = 1 << 16
NUM_STREAMS = 3


def serve(channel: socket.socket) -> None:
    """Import what the first message names, then answer requests until the channel is closed."""
    end_with_parent()
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the ranks and for who asked
    if (first := receive(channel)) is None:
        return
    given, _ = first
    os.umask(given["umask"])
    sys.path[:0] = [folder for folder in given["path"] if folder not in sys.path]
    import_all(given["modules"])
    send(channel, {"ready": 1})
    while (received := receive(channel)) is not None:
        request, streams = received
        with ended_with_peer(channel):
            code = run_ranks(request, streams, channel)
        send(channel, {"code": code})


def import_all(modules: list[str]) -> None:
    """Import modules, which stay: no garbage collection looks at them."""
    gc.disable()
    for name in ("numpy", *modules):  # before torch: its OpenBLAS spins where `ulimit -v` leaves nothing
        with suppress(ImportError):  # not installed, or of another version: a rank says so
            import_module(name)
    gc.freeze()
    gc.enable()


def send(channel: socket.socket, message: dict[str, int]) -> None:
    """Send a line of JSON."""
    channel.sendall(json.dumps(message).encode() + b"\n")


@contextmanager
def ended_with_peer(channel: socket.socket) -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    flags = fcntl.fcntl(channel, fcntl.F_GETFL)
    fcntl.fcntl(channel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(channel, fcntl.F_SETSIG, signal.SIGTERM)
    fcntl.fcntl(channel, fcntl.F_SETFL, flags | os.O_ASYNC)
    poll = select.poll()
    poll.register(channel, 0)
    if poll.poll(0):  # closed before
        os.kill(os.getpid(), signal.SIGTERM)
    yield
    fcntl.fcntl(channel, fcntl.F_SETFL, flags)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next request and its standard streams; None after the last."""
    data, streams = b"", list[int]()
    while not data.endswith(b"\n"):
        head = channel.recv(MOST_BYTES, socket.MSG_PEEK)  # the next message may be there already
        if not head:
            return None
        part, found, _, _ = socket.recv_fds(channel, head.find(b"\n") + 1 or len(head), NUM_STREAMS)
        data, streams = data + part, streams + found
    return json.loads(data), streams


def end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def run_ranks(request: dict[str, Any], streams: list[int], channel: socket.socket) -> int:
    """Run a program on its ranks; return 0, or the exit code of the first rank that failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {fork_rank(request, rank, port, streams, channel) for rank in range(request["num_ranks"])}
    for stream in streams:
        os.close(stream)
    code = 0
    while ranks:
        process, status = os.wait()
        if process in ranks and status and not code:
            code = os.waitstatus_to_exitcode(status)
            for other in ranks - {process}:
                os.kill(other, signal.SIGKILL)
        ranks.discard(process)
    end_orphans()
    return code


def end_orphans() -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while True:
        for process in children.read_text().split() if children.exists() else ():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def fork_rank(
    request: dict[str, Any], rank: int, port: int, streams: list[int], channel: socket.socket
) -> int:
    if process := os.fork():
        return process
    code = 1
    try:
        end_with_parent()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        channel.close()
        use_streams(streams)
        num_ranks = request["num_ranks"]
        for name in os.environ.keys() - request["environment"].keys():
            del os.environ[name]
        os.environ.update(request["environment"])
        if num_ranks > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(num_ranks)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.chdir(request["place"])
        sys.path[:0] = request["path"]
        run_program(request["argv"])
        code = 0
    except SystemExit as error:
        code = exit_code(error)
    except BaseException:
        traceback.print_exc()
    finally:
        end_process(code)


def use_streams(streams: list[int]) -> None:
    """Make open files the standard streams; those of the server may be of another kind."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = written(1, sys.stdout)
    sys.stderr = written(2, sys.stderr)


def written(number: int, before: TextIO) -> TextIO:
    """Return a stream that writes lines to an open file, encoded as another stream."""
    return open(number, "w", 1, encoding=before.encoding, errors=before.errors, closefd=False)


def run_program(argv: list[str]) -> None:
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.modules.pop(argv[1], None)  # runpy warns of a module that is imported
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


def exit_code(error: SystemExit) -> int:
    """Return the exit code of a program that raised SystemExit; print a message, as Python does."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def end_process(code: int) -> NoReturn:
    """Wait for threads and run exit handlers as Python's end does, without the rest of it."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as given:
        serve(given)
