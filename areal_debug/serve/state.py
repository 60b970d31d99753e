"""The state of servers that outlive a shell: one small file each, in a folder of the user.

    {state}/areal-debug/servers/127.0.0.1-30000.json   by the keeper; removed by `--stop`
    {state}/areal-debug/servers/127.0.0.1-30000.log    the output of the server

A file contains the last state that the keeper wrote. Whether the keeper still runs is checked by
pid and start time, since pids are reused.
"""

import json
import os
import signal
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from areal_core.safety.durable import commit_file


@dataclass(frozen=True)
class ServerState:
    """One server.

    `phase` is "starting", "ready" or "failed", `message` is the reason, `run` is the run that it
    joined, and `folder` the one that it was started in.
    """

    address: str
    engine: str
    model: str
    log: str
    keeper_pid: int
    keeper_started: float  # seconds since the epoch, from the process table
    phase: str = "starting"
    message: str = ""
    run: str = ""
    folder: str = ""

    @property
    def keeper_lives(self) -> bool:
        """True if the keeper process is still running."""
        import psutil

        try:
            return abs(psutil.Process(self.keeper_pid).create_time() - self.keeper_started) < 1.0
        except psutil.NoSuchProcess:
            return False


def state_folder() -> Path:
    """Return `$XDG_STATE_HOME/areal-debug/servers`, by default in `~/.local/state`."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "areal-debug" / "servers"


def state_file(address: str) -> Path:
    """Return the path of the state of the server at `host:port`, in a folder of mode 700."""
    state_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    return state_folder() / f"{address.replace(':', '-')}.json"


def this_keeper(address: str, engine: str, model: str, run: str) -> ServerState:
    import psutil

    me = psutil.Process()
    log = state_file(address).with_suffix(".log")
    return ServerState(
        address, engine, model, str(log), me.pid, me.create_time(), run=run, folder=os.getcwd()
    )


def write_state(state: ServerState, phase: str = "starting", message: str = "") -> ServerState:
    """Write the state atomically; return it with the new phase."""
    state = replace(state, phase=phase, message=message)
    file = state_file(state.address)
    commit_file(file, json.dumps(asdict(state)))
    return state


def read_state(file: Path) -> ServerState:
    """Read a state file. Raises `ValueError` if `serve` of this version did not write it."""
    try:
        return ServerState(**json.loads(file.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{file} was not written by this version of `areal-debug serve` ({error}): remove it"
        ) from error


def known_servers() -> list[ServerState]:
    """Return every server that has not been stopped, by address."""
    return [read_state(file) for file in sorted(state_folder().glob("*.json"))]


def forget(state: ServerState) -> None:
    """Remove the state of a server; its log stays."""
    state_file(state.address).unlink(missing_ok=True)


def stop_keeper(state: ServerState, timeout_s: float = 30.0) -> None:
    """End a keeper and with it its server; does nothing if it has ended already.

    Raises:
        psutil.TimeoutExpired: it does not end.
    """
    import psutil

    if state.keeper_lives:
        keeper = psutil.Process(state.keeper_pid)
        try:
            keeper.send_signal(signal.SIGTERM)
            keeper.wait(timeout_s)
        except psutil.NoSuchProcess:
            pass
    forget(state)
