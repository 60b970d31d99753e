"""Run programs in forks of a process that has torch imported, and start that process.

A test that needs a new interpreter, such as one of what a command imports, uses `subprocess`.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

SERVER = Path(__file__).with_name("fork_server.py")
ADDRESS = "AREAL_TEST_FORKS"
KEPT = (ADDRESS, "PYTEST_CURRENT_TEST")  # pytest deletes its own while threads start programs
ROOM = {"AREAL_TEST_ROOM": "x" * 1024}  # for variables of forks, among those that /proc shows
COMMAND = str(Path(sys.executable).parent / "areal-debug")


def start_server() -> subprocess.Popen[bytes]:
    """Start the process, which ends with its stdin; its address is in the environment."""
    folder = tempfile.mkdtemp(prefix="forks")
    os.environ[ADDRESS] = f"{folder}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.environ[ADDRESS])
        listener.listen(64)
        command = [sys.executable, "-P", str(SERVER), str(listener.fileno())]
        environment = os.environ | ROOM | {"PYTHONHASHSEED": "0"}  # of deterministic runs
        return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=environment)


def send_request(
    channel: socket.socket,
    argv: Sequence[str],
    environment: Mapping[str, str],
    place: Path | None,
    streams: list[int],
    visible: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Ask for a fork, which answers with its process id and its exit code.

    `visible` are those of its variables that /proc/PID/environ has.
    """
    channel.connect(os.environ[ADDRESS])
    request = {"argv": [*argv], "environment": {**environment}, "place": str(place or Path.cwd())}
    request["visible"] = {**visible}
    data = json.dumps(request).encode() + b"\n"
    channel.sendall(data[socket.send_fds(channel, [data], streams) :])


def run_forked(
    argv: Sequence[str],
    environment: Mapping[str, str] | None = None,
    place: Path | None = None,
    typed: str = "",
    timeout_s: float = 240,
    terminal: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `-m MODULE ARGUMENT...` or `FILE ARGUMENT...` in a fork, as `run_anew` runs it.

    With `terminal`, an open file, it prints there, and no output is returned.
    """
    variables = {"OMP_NUM_THREADS": "1", **(os.environ if environment is None else environment)}
    variables.pop(ADDRESS, None)
    with (
        socket.socket(socket.AF_UNIX) as channel,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
    ):
        given.write(typed.encode())
        given.seek(0)
        printed = [output.fileno(), errors.fileno()] if terminal is None else [terminal, terminal]
        send_request(channel, argv, variables, place, [given.fileno(), *printed])
        with channel.makefile() as answer:
            process = int(answer.readline())
            channel.settimeout(timeout_s)
            try:
                code = int(answer.readline())
            except TimeoutError:
                with suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
                raise subprocess.TimeoutExpired(argv, timeout_s) from None
        for stream in (output, errors):
            stream.seek(0)
        return subprocess.CompletedProcess(argv, code, output.read(), errors.read())


class ForkedProgram:
    """A fork that runs `argv`, as in `run_forked`, until it ends or a test kills it.

    Its stdin stays open and silent. It prints to `log`, or where this process prints. The variables
    in `visible` are seen by other processes, too.
    """

    def __init__(
        self,
        argv: Sequence[str],
        place: Path,
        visible: Mapping[str, str] = MappingProxyType({}),
        log: Path | None = None,
    ) -> None:
        variables = {name: os.environ[name] for name in os.environ if name not in KEPT} | visible
        self._channel = socket.socket(socket.AF_UNIX)
        stdin, self._silence = os.pipe()
        with open(log or os.devnull, "w") as file:
            printed = [file.fileno()] * 2 if log else [1, 2]
            send_request(self._channel, argv, variables, place, [stdin, *printed], visible)
        os.close(stdin)
        self._answer = self._channel.makefile()
        self.process_id = int(self._answer.readline())

    def is_running(self) -> bool:
        return not select.select([self._channel], [], [], 0)[0]

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end; fine if the program has ended, or was killed before."""
        if self._answer.closed:
            return
        if self.is_running():  # its number may be that of another process otherwise
            with suppress(ProcessLookupError):  # ended, and not yet reported
                os.kill(self.process_id, signal.SIGKILL)
        self._answer.read()
        self._answer.close()
        self._channel.close()
        os.close(self._silence)


def run_anew(
    argv: Sequence[str], environment: Mapping[str, str] | None = None, place: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program by a new interpreter, which imports all that it needs."""
    variables = {"OMP_NUM_THREADS": "1", **(os.environ if environment is None else environment)}
    command = [sys.executable, *argv]
    return subprocess.run(command, cwd=place, env=variables, capture_output=True, text=True, timeout=240)


def worker_command() -> str:
    """Return what starts a program in a fork, such as a worker of pytest-xdist, for who starts a command.

    It takes the place of the interpreter, and needs `ADDRESS` in its environment.
    """
    return f"{sys.executable} -SP {__file__}"


if __name__ == "__main__":  # `-u -c CODE`, as execnet starts a Python, or `-m MODULE ARGUMENT...`
    with socket.socket(socket.AF_UNIX) as asked:
        send_request(asked, sys.argv[1 + (sys.argv[1] == "-u") :], os.environ, None, [0, 1, 2])
        with asked.makefile() as answered:
            sys.exit(int(answered.read().split()[1]))
