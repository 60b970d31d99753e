"""The process that supervises one inference server: starts it, reports its state, ends it.

serve (the command)                keeper (own session)           server (ends with its keeper)
starts the keeper -------------->  starts the server ---------->  loads; output -> log file
reads the state file every 0.2 s   waits for /health <----------  answers
  until it is ready or failed <--  joins a run, writes "ready"
returns; the shell may end         polls every second: ended? ->
serve --stop: SIGTERM ---------->  leaves the run, ends the server, removes the state file
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_core.errors import ServerFailed
from areal_core.launch.sglang_process import SGLangServer
from areal_core.launch.torchrun import ended_on_signals
from areal_core.rollout.errors import NoSuchName
from areal_core.safety.interpreter import python_command
from areal_core.servers.discovery import FolderNames, register_server
from areal_core.servers.server import last_lines
from areal_debug.serve.state import ServerState, forget, read_state, state_file, this_keeper, write_state

MODULES = {"sglang": "sglang.launch_server", "embedded": "areal_core.testing.embedded_server"}
POLL_S = 0.2


@dataclass(frozen=True)
class ServeSpec:
    """The server to start.

    `run` is the "experiment/trial" to join, or ""; its names are stored below `names_root`.
    """

    model: str
    engine: str
    host: str
    port: int
    args: list[str]
    env: dict[str, str]
    ready_timeout_s: float
    run: str = ""
    names_root: str = ""

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"{self.host}:{self.port}"

    @property
    def log(self) -> str:
        """Path of the file with the server's output."""
        return str(state_file(self.address).with_suffix(".log"))


def keep(spec: ServeSpec, when_ready: Callable[[ServerState], None] = lambda state: None) -> None:
    """Serve until SIGTERM, SIGINT, or the end of the server.

    Raises:
        ServerFailed: the server ended, or was not ready in time; the state file reports it, too.
    """
    with ended_on_signals(), ExitStack() as stack:
        state = write_state(this_keeper(spec.address, spec.engine, spec.model, spec.run))
        # Removed after a regular end; kept after a failure, so that `serve --status` reports it.
        forgetting = stack.enter_context(ExitStack())
        forgetting.callback(forget, state)
        try:
            server = SGLangServer(
                spec.model,
                Path(state.log),
                spec.args,
                spec.env,
                host=spec.host,
                port=spec.port,
                ready_timeout_s=spec.ready_timeout_s,
                module=MODULES[spec.engine],
            )
            stack.callback(server.stop)
            server.wait_until_ready()
            join_run(stack, spec)
            when_ready(write_state(state, "ready"))
            while True:
                server.check()
                time.sleep(1.0)
        except ServerFailed as failure:
            forgetting.pop_all()
            write_state(state, "failed", str(failure))
            raise


def join_run(stack: ExitStack, spec: ServeSpec) -> None:
    if spec.run:
        experiment, _, trial = spec.run.partition("/")
        names = FolderNames(spec.names_root)
        name = register_server(names, experiment, trial, spec.address)
        stack.callback(leave_run, names, name)


def leave_run(names: FolderNames, name: str) -> None:
    with suppress(NoSuchName):
        names.delete(name)


def keep_in_background(spec: ServeSpec) -> ServerState:
    """Start a keeper that outlives this process, and wait until its server is ready.

    Raises:
        ServerFailed: it ended, or was not ready in time.
    """
    file = state_file(spec.address)
    file.unlink(missing_ok=True)
    output = file.with_suffix(".keeper.log")
    with output.open("wb") as log:
        keeper = subprocess.Popen(
            python_command("-m", "areal_debug.serve.keeper", json.dumps(asdict(spec))),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while True:
            # Polled before the file is read: the keeper may write the file and then end.
            ended = keeper.poll() is not None
            state = read_state(file) if file.exists() else None
            if state is not None and state.phase == "ready":
                return state
            if state is not None and state.phase == "failed":
                raise ServerFailed(state.message)
            if ended:
                raise ServerFailed(
                    f"the keeper of the server ended; the last lines of {output}:\n{last_lines(output)}"
                )
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        keeper.terminate()
        keeper.wait()
        raise


def main(text: str) -> int:
    """Run a keeper. Return 1 if the server failed; the state file contains the reason."""
    try:
        keep(ServeSpec(**json.loads(text)))
    except ServerFailed:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
