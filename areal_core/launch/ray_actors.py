"""Actors of the Ray launcher on each machine: one for a server, one for the trainer's ranks.

Each has three threads of Ray: one waits for the child, one ends it when the launcher calls `stop`,
one answers. A child ends with the thread that started it, and so with its actor.
"""

import signal
from pathlib import Path
from typing import Any

import ray

from areal_core.launch.processes import Child, end_tree, start
from areal_core.launch.server_plan import ServerPlan, start_server
from areal_core.launch.sglang_server import SGLangServer, free_port
from areal_core.launch.torchrun import shell_code


class AgentActor:
    """Runs one command on its machine. `stop` is called while `run` waits."""

    def __init__(self) -> None:
        self._child: Child | None = None

    def address(self) -> tuple[str, int]:
        """Return this machine's address, and a free port on it."""
        host = own_address()
        return host, free_port(host)

    def run(self, command: list[str], env: dict[str, str], log: str, folder: str) -> int:
        """Run a command to its end in `folder`; return its exit code as a shell would show it."""
        with open(log, "wb") as output:
            self._child = start(command, env, output, Path(folder))
            code = self._child.wait()
            if code < 0:
                output.write(f"killed by {signal.Signals(-code).name}\n".encode())
        end_tree(self._child)
        return shell_code(code)

    def stop(self) -> None:
        """End the command and everything that it has started."""
        if self._child is not None:
            end_tree(self._child)


class ServerActor:
    """Runs one inference server on its machine. `stop` is called while `wait` waits."""

    def __init__(self) -> None:
        self._server: SGLangServer | None = None

    def start(self, plan: ServerPlan) -> str:
        """Start the server; return its address."""
        self._server = start_server(plan, own_address())
        return self._server.server.address

    def wait_until_ready(self) -> None:
        """Wait until `/health` answers. Raises `ServerFailed`."""
        self._started().wait_until_ready()

    def wait(self) -> int:
        """Wait for the end of the server; return its exit code."""
        return self._started().process.wait()

    def stop(self) -> None:
        """End the server and all its workers."""
        if self._server is not None:
            self._server.stop()

    def _started(self) -> SGLangServer:
        assert self._server is not None, "start() comes first"
        return self._server


def own_address() -> str:
    """Return the address of this machine as Ray knows it."""
    address: Any = ray.util.get_node_ip_address  # Ray leaves it without annotations
    return address()
