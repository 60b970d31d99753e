"""Run Python programs in forks of one process that has imported their libraries.

    python fork_server.py SOCKET_NUMBER    imports at the first connection
    a test ── argv, environment, place, standard streams ──> fork ─> fork: the program
           <── its process id, then its exit code ──────────┘
stdin, which is a pipe of the process that started it: at its end, this process and its forks end

A program that starts ranks with this interpreter (LAUNCHED) forks them too: a process of its own
with its own streams, environment and session, but without an interpreter that imports torch again.
`forks.py` is the other side.
"""

import atexit
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
sys.path[0] = str(ROOT)
INSTALLED = sys.path[1:]
from areal_core.launch import warm_server  # noqa: E402
from areal_core.safety.interpreter import SAFE, python_command  # noqa: E402
from tests.huge_pages import use_huge_pages  # noqa: E402

MODULES = (
    "areal_core.trainer.rl",
    "areal_debug.replay.observer",
    "areal_debug.train.script_options",
    "areal_debug.wiring",
    "torch.distributed.checkpoint",
    "torch.distributed.run",
    "torch.utils.tensorboard",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_tokenizers",
)
# What tests import besides, without a thread, as pyarrow has one; not all of it is installed everywhere.
OF_TESTS = (
    *("anthropic", "areal_core.testing.embedded_server", "consistency.check", "hangdoctor.diagnose"),
    *("bm25s", "hypothesis", "mcp", "mistral_common.tokens.tokenizers.mistral", "openai", "peft"),
    *("trl.import_utils", "wandb", "zarr"),
)
# What our launchers start, and the scripts of torchrun: `python -u FILE`.
PROGRAMS = (
    *("areal_core.launch.node", "areal_core.reward.reward_worker", "areal_core.testing.embedded_server"),
    *("areal_debug.rank_tasks.on_rank", "areal_debug.serve.keeper", "areal_debug.train.script"),
    "areal_debug.mcp.in_child",
)
COMMANDS = [" ".join(python_command("-m", name)[1:]) for name in PROGRAMS]
LAUNCHED = (*COMMANDS, f"{SAFE} {warm_server.__file__}", "-u ")
execute = subprocess._fork_exec  # type: ignore[attr-defined]
OF_SERVER: set[int] = set()  # open files of the process that is forked


def main(number: int) -> None:
    """Answer connections until stdin ends."""
    listener = socket.socket(fileno=number)
    imported = False
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [], 1.0)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if sys.stdin in ready:
            address = Path(listener.getsockname())
            address.unlink()
            address.parent.rmdir()
            return
        if not ready:
            continue
        connection, _ = listener.accept()
        if not imported:
            warm_server.import_all([*MODULES, *OF_TESTS])
            use_huge_pages()
            imported = True
        if not os.fork():
            listener.close()
            answer(connection)
        connection.close()


def answer(connection: socket.socket) -> NoReturn:
    """Fork the program of a request, and send its process id and its exit code."""
    warm_server.end_with_parent()
    received = warm_server.receive(connection)
    assert received is not None
    request, streams = received
    process = os.fork()
    if not process:
        warm_server.end_with_parent()
        if request["argv"][0] != "-c":  # a Ctrl-C is for the workers of pytest, too
            os.setsid()
        connection.close()
        if request["visible"]:
            show(request["visible"])
        # A program that others look at runs its exit handlers where Python does.
        end = sys.exit if request["visible"] else warm_server.end_process
        become(request["argv"], request["environment"], request["place"], streams, end)
    for stream in streams:
        os.close(stream)
    with suppress(BrokenPipeError):  # of a test that does not wait any more
        connection.sendall(b"%d\n" % process)
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    os._exit(0)


def show(variables: Mapping[str, str]) -> None:
    """Write variables into /proc/PID/environ, in the place of those that this process started with."""
    facts = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = (int(fact) for fact in facts[47:49])  # env_start and env_end of proc_pid_stat(5)
    shown = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items())
    room = end - begin - len(shown) - len(b"ROOM=\0")
    assert room >= 0, f"{end - begin} bytes are too few for {variables}"
    os.environ.update(os.environ)  # copies, as what is there is replaced
    ctypes.memmove(begin, shown + b"ROOM=" + b"x" * room + b"\0", end - begin)


def become(
    argv: list[str],
    environment: Mapping[str, str],
    place: str,
    streams: list[int],
    end: Callable[[int], NoReturn] = warm_server.end_process,
) -> NoReturn:
    """Turn this fork into a program: `-m MODULE ARGUMENT...` or `FILE ARGUMENT...`, after -P or -u."""
    code = 1
    is_safe = argv[0] == SAFE
    argv = argv[argv[0] in (SAFE, "-u") :]
    try:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        os.chdir(place)
        first = os.getcwd() if argv[0] == "-m" else os.path.dirname(os.path.abspath(argv[0]))
        given = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [*([] if is_safe else [first]), *filter(None, given), *INSTALLED]
        warm_server.use_streams(streams)
        if argv[0] == "-c":  # a worker of pytest: its tests start new interpreters
            sys.argv, sys.modules["__main__"] = ["-c"], ModuleType("__main__")
            exec(argv[1], vars(sys.modules["__main__"]))
            code = 0
            return
        subprocess._fork_exec = fork_or_execute  # type: ignore[attr-defined]
        OF_SERVER.update(open_files())
        if argv[0] == "-m":
            sys.modules.pop(argv[1], None)  # run as the main program
        warm_server.run_program(argv)
        code = 0
    except SystemExit as error:
        code = warm_server.exit_code(error)
    except BaseException:
        warm_server.traceback.print_exc()
    finally:
        end(code)


def fork_or_execute(
    arguments: Sequence[bytes | str],
    executables: Sequence[bytes],
    close_others: bool,
    kept: Sequence[int],
    place: str | None,
    environment: Sequence[bytes] | None,
    *settings: Any,
) -> int:
    """Start a program as `_posixsubprocess.fork_exec` does, by a fork if it is in LAUNCHED."""
    words = [os.fsdecode(word) for word in arguments]
    if words[0] != sys.executable or not " ".join(words[1:]).startswith(LAUNCHED):
        return execute(arguments, executables, close_others, kept, place, environment, *settings)
    sys.stdout.flush()
    sys.stderr.flush()
    if process := os.fork():
        return process
    try:
        stdin, _, _, stdout, _, stderr, _, executed, _, new_session = settings[:10]
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()  # those of the program that starts this one
        if new_session:
            os.setsid()
        os.close(executed)  # tells our parent that the program has started
        if (prepare := settings[15]) is not None:
            prepare()
        streams = [os.dup(i if stream == -1 else stream) for i, stream in enumerate((stdin, stdout, stderr))]
        if close_others:
            for descriptor in open_files() - OF_SERVER - {*streams, *kept}:
                os.close(descriptor)
        variables = os.environ if environment is None else dict(map(variable, environment))
        become(words[1:], variables, place or os.getcwd(), streams)
    except BaseException:
        warm_server.traceback.print_exc()
    finally:
        os._exit(255)


def variable(assignment: bytes) -> tuple[str, str]:
    """Split NAME=VALUE."""
    name, _, value = os.fsdecode(assignment).partition("=")
    return name, value


def open_files() -> set[int]:
    """Return the numbers of the files that this process has open, without that of the listing."""
    found = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            os.fstat(int(name))
            found.add(int(name))
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]))
