"""What is known of the servers that outlive a shell: one small file each, in a folder of the user's own.

    {state}/areal-debug/servers/127.0.0.1-30000.json      written by the keeper, removed by `serve --stop`
    {state}/areal-debug/servers/127.0.0.1-30000.log       everything the server prints

A file says what its keeper knew last. Whether the keeper still lives is asked of the system: by pid and start time, since pids
are given again.
"""

import json
import os
import signal
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil


@dataclass(frozen=True)
class ServerState:
    """One server. `phase` is "starting", "ready" or "failed", and `message` says why; `run` is what it joined."""

    address: str
    engine: str
    model: str
    log: str
    keeper_pid: int
    keeper_started: float  # seconds since the epoch, as the system tells
    phase: str = "starting"
    message: str = ""
    run: str = ""

    @property
    def keeper_lives(self) -> bool:
        try:
            return abs(psutil.Process(self.keeper_pid).create_time() - self.keeper_started) < 1.0
        except psutil.NoSuchProcess:
            return False


def state_folder() -> Path:
    """`$XDG_STATE_HOME/areal-debug/servers`, by default below `~/.local/state`; made for this user alone."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(base) / "areal-debug" / "servers"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def state_file(address: str) -> Path:
    """Where the state of the server at `host:port` is kept."""
    return state_folder() / f"{address.replace(':', '-')}.json"


def this_keeper(address: str, engine: str, model: str, run: str) -> ServerState:
    """The state of a server that this process is about to keep."""
    me = psutil.Process()
    log = state_file(address).with_suffix(".log")
    return ServerState(address, engine, model, str(log), me.pid, me.create_time(), run=run)


def write_state(state: ServerState, phase: str = "starting", message: str = "") -> ServerState:
    """Puts the state, in this phase, where others find it; they see the old or the new one, never a part."""
    state = replace(state, phase=phase, message=message)
    file = state_file(state.address)
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(json.dumps(asdict(state)))
    unfinished.replace(file)
    return state


def read_state(file: Path) -> ServerState:
    """Raises `ValueError` for a file that no `serve` of this version wrote."""
    try:
        return ServerState(**json.loads(file.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} is not what `areal-debug serve` writes ({error}): remove it") from error


def known_servers() -> list[ServerState]:
    """Every server that has not been stopped, by address."""
    return [read_state(file) for file in sorted(state_folder().glob("*.json"))]


def forget(state: ServerState) -> None:
    """Removes what is known of a server; its log stays."""
    state_file(state.address).unlink(missing_ok=True)


def stop_keeper(state: ServerState, timeout_s: float = 30.0) -> None:
    """Ends a keeper, and by it its server. Fine when it has ended. Raises `psutil.TimeoutExpired` when it does not end."""
    if state.keeper_lives:
        keeper = psutil.Process(state.keeper_pid)
        try:
            keeper.send_signal(signal.SIGTERM)
            keeper.wait(timeout_s)
        except psutil.NoSuchProcess:
            pass
    forget(state)
