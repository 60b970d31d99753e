"""One inference server: its address, and blocking calls to it.

Control calls (pause, weight update, flush) are few and slow, and are made from the trainer's
thread, so they are plain blocking HTTP, concurrent over all servers in `pool.py`; only requests of
tokens are asynchronous (`client.py`).
"""

import http.client
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_core.environment import ADDRESSES_VARIABLE
from areal_core.rollout.errors import NoServers, RequestRefused, ServerDied, WrongServer
from areal_core.safety.secrets import masker
from areal_core.servers.reply import json_of

LOGS_VARIABLE = "AREAL_LLM_SERVER_LOGS"
MESSAGE_LIMIT = 500  # characters of a reply in an error message
LINE_LIMIT = 300  # characters of a log line


@dataclass(frozen=True)
class Server:
    """An inference server: `host:port`, and its log file if known. Raises `WrongServer`."""

    address: str
    log: Path | None = None

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal():
            raise WrongServer(
                f"{self.address!r} is not an address of an inference server: expected host:port"
            )

    def describe(self) -> str:
        """Return the address, followed by the last log lines where they can be read."""
        if self.log is None or not self.log.exists():
            return self.address
        return f"{self.address}; the last lines of {self.log}:\n{last_lines(self.log)}"


def last_lines(path: Path, num_lines: int = 15, max_bytes: int = 16384) -> str:
    """Return the end of a log file, indented, without empty lines and credentials.

    Very long lines are cut.
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - max_bytes))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    shown = masker().text("\n".join(lines[-num_lines:])).splitlines()
    return "\n".join(f"    {line[:LINE_LIMIT]}" for line in shown)


def servers_from_environment(environ: Mapping[str, str] = os.environ) -> list[Server]:
    """Return the servers in the variables that the launcher sets.

    These are `AREAL_LLM_SERVER_ADDRS` (`host:port,host:port`) and `AREAL_LLM_SERVER_LOGS`. Raises
    `NoServers` if the first is empty.
    """
    addresses = [a for a in environ.get(ADDRESSES_VARIABLE, "").split(",") if a]
    if not addresses:
        raise NoServers(
            f"{ADDRESSES_VARIABLE} is not set: start the run with the launcher, or set it to host:port,host:port"
        )
    logs: list[Path | None] = [Path(log) for log in environ.get(LOGS_VARIABLE, "").split(",") if log]
    return [Server(a, log) for a, log in zip(addresses, logs or [None] * len(addresses), strict=True)]


def environment_of(servers: list[Server]) -> dict[str, str]:
    logs = [str(server.log) for server in servers if server.log is not None]
    return {ADDRESSES_VARIABLE: ",".join(s.address for s in servers), LOGS_VARIABLE: ",".join(logs)}


def call(server: Server, method: str, path: str, payload: Any = None, timeout_s: float = 60.0) -> str:
    """Send one HTTP request; return the body of a 200 reply.

    Raises:
        RequestRefused: another status, or a JSON body with `"success": false`; the message never
            contains the payload.
        OSError: no connection, or no reply in time.
    """
    return call_on(http.client.HTTPConnection(server.address, timeout=timeout_s), method, path, payload)


def call_on(connection: http.client.HTTPConnection, method: str, path: str, payload: Any = None) -> str:
    """Send one HTTP request over a new connection and close it; return and raise as `call` does."""
    address = f"{connection.host}:{connection.port}"
    try:
        body = None if payload is None else json.dumps(payload)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise ConnectionError(f"{address}{path}: {error!r}") from error
    finally:
        connection.close()
    if reply.status != 200 or reports_failure(text):
        raise RequestRefused(f"{address}{path} answered {reply.status}: {text[:MESSAGE_LIMIT]}", reply.status)
    return text


def reports_failure(body: str) -> bool:
    """Return whether a reply is a JSON object with a false `success`.

    SGLang sends some of these with status 200.
    """
    try:
        parsed = json_of(body)
    except ValueError:  # a text, or nothing
        return False
    return isinstance(parsed, dict) and parsed.get("success") is False


def is_reachable(server: Server, timeout_s: float = 10.0) -> bool:
    """Return whether the address accepts connections."""
    host, _, port = server.address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def is_healthy(server: Server, timeout_s: float = 5.0) -> bool:
    """Return whether `/health` answers 200."""
    try:
        call(server, "GET", "/health", timeout_s=timeout_s)
    except (OSError, RequestRefused):
        return False
    return True


def wait_until_healthy(
    servers: list[Server], timeout_s: float, check: Callable[[], None] = lambda: None
) -> None:
    """Poll `/health` until all servers answer, or raise `ServerDied` after `timeout_s`.

    `check` is called between polls and may raise.
    """
    deadline = time.monotonic() + timeout_s
    for server in servers:
        while not is_healthy(server):
            check()
            if time.monotonic() > deadline:
                raise ServerDied(f"not ready after {timeout_s:.0f} s: server {server.describe()}")
            time.sleep(0.5)
