"""A server of any engine as a process of this machine: started, awaited, ended."""

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import Any, Self

from areal_core.errors import ServerFailed
from areal_core.launch.processes import end_tree, start
from areal_core.rollout.errors import ServerDied
from areal_core.servers.server import Server, wait_until_healthy

LISTENING_PORTS = range(20_000, 32_768)  # Linux assigns outgoing connections those from 32,768


class InferenceServer:
    """A running server; a context manager that stops it. `server` is what a client needs.

    Args:
        command: program and its arguments, without the address.
        log: file for everything the server prints.
        env: changes to the environment.
        host, port: where to listen; port 0 for any free one.
        ready_timeout_s: maximum seconds until `/health` answers.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        env: dict[str, str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        ready_timeout_s: float = 300.0,
    ) -> None:
        self.server = Server(f"{host}:{port or free_port(host)}", log)
        self._ready_timeout_s = ready_timeout_s
        _, _, listen = self.server.address.rpartition(":")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self.process = start([*command, "--host", host, "--port", listen], env, output)

    def wait_until_ready(self) -> Self:
        """Wait until `/health` answers.

        Raises `ServerFailed`, with the last log lines, and stops the server.
        """
        try:
            wait_until_healthy([self.server], self._ready_timeout_s, self.check)
        except (ServerDied, ServerFailed) as failure:
            self.stop()
            raise ServerFailed(str(failure)) from failure
        return self

    def check(self) -> None:
        """Raise `ServerFailed` when the process has ended."""
        code = self.process.poll()
        if code is not None:
            raise ServerFailed(f"ended with exit code {code}: server {self.server.describe()}")

    def stop(self) -> None:
        """End the server and all its workers."""
        end_tree(self.process)

    def __enter__(self) -> Self:
        return self.wait_until_ready()

    def __exit__(self, *_: object) -> None:
        self.stop()


def flags(options: Mapping[str, Any]) -> list[str]:
    """Return one flag per option; a bare one for True, none for None, False and empty values."""
    args: list[str] = []
    for name, value in options.items():
        if value is None or value is False or value == "" or value == []:
            continue
        args.append("--" + name.replace("_", "-"))
        if value is not True:
            args += [str(v) for v in value] if isinstance(value, list) else [str(value)]
    return args


def path_with(folder: Path) -> str:
    """Return a PYTHONPATH with a folder before those of this process."""
    path = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.pathsep.join(entry for entry in path if entry)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free at this moment, if possible none for outgoing connections.

    The server binds it seconds later: a connection of any process may take one of those until then.
    """
    with socket.socket() as listener:
        # deterministic: a free port, not data
        for port in SystemRandom().sample(LISTENING_PORTS, 100):
            with suppress(OSError):
                listener.bind((host, port))
                return port
        listener.bind((host, 0))
        return listener.getsockname()[1]
