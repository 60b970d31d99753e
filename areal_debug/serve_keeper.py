"""The process that stays with one inference server: starts it, tells how it is, ends it.

serve (the command)                keeper, a session of its own             server, ends when the keeper does
starts the keeper -------------->  starts the server ------------------->   loads; output -> log file
reads the state file every 0.2 s   waits for /health <-----------------     answers
  until it is ready or failed <--  joins a run's names, writes "ready"
returns; the shell may end         asks every second: ended? ---------->
serve --stop: SIGTERM ---------->  leaves the names, ends the server, forgets the state
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_core.launch.errors import ServerFailed
from areal_core.launch.sglang_server import SGLangServer
from areal_core.launch.torchrun import ended_on_signals
from areal_core.rollout.errors import NoSuchName
from areal_core.rollout.name_service import FolderNames, register_server
from areal_core.rollout.servers import last_lines
from areal_debug.serve_state import (
    ServerState,
    forget,
    read_state,
    state_file,
    this_keeper,
    write_state,
)

MODULES = {"sglang": "sglang.launch_server", "embedded": "areal_core.launch.embedded_server"}
POLL_S = 0.2


@dataclass(frozen=True)
class ServeSpec:
    """What to serve. `run` is the "experiment/trial" to join, or "", in the names below `names_root`."""

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
        return f"{self.host}:{self.port}"

    @property
    def log(self) -> str:
        return str(state_file(self.address).with_suffix(".log"))


def keep(spec: ServeSpec, when_ready: Callable[[ServerState], None] = lambda state: None) -> None:
    """Serves until SIGTERM, SIGINT, or the end of the server.

    Raises:
        ServerFailed: the server ended, or was not ready in time; the state says so as well.
    """
    with ended_on_signals(), ExitStack() as stack:
        state = write_state(this_keeper(spec.address, spec.engine, spec.model, spec.run))
        # Forgotten when told to end; a failure stays, so that `serve --status` can tell of it.
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
    """Adds the server to the names of a run, until the stack ends."""
    if spec.run:
        experiment, _, trial = spec.run.partition("/")
        names = FolderNames(spec.names_root)
        name = register_server(names, experiment, trial, spec.address)
        stack.callback(leave_run, names, name)


def leave_run(names: FolderNames, name: str) -> None:
    """Takes the server out of a run's names, if the run has not cleared them."""
    with suppress(NoSuchName):
        names.delete(name)


def keep_in_background(spec: ServeSpec) -> ServerState:
    """Starts a keeper that survives us, and waits until its server is ready.

    Raises:
        ServerFailed: it ended, or was not ready in time.
    """
    file = state_file(spec.address)
    file.unlink(missing_ok=True)
    output = file.with_suffix(".keeper.log")
    with output.open("wb") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "areal_debug.serve_keeper", json.dumps(asdict(spec))],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while True:
            ended = keeper.poll() is not None  # before the file is read, which it may write as its last act
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
    """Exit code 1 when the server failed; the state file says how."""
    try:
        keep(ServeSpec(**json.loads(text)))
    except ServerFailed:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
