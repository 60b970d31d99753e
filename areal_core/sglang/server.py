"""One inference server: its address, blocking calls to it, and the check of what it serves.

Control calls (pause, weight update, flush) are few and slow, and are made from the trainer's
thread, so they are plain blocking HTTP, concurrent over all servers in `pool.py`; only `/generate`
is asynchronous (`client.py`).

A server's identity comes from `/server_info` and `/model_info`. After a weight update by disk
`/model_info` names the folder of that update as the model; `/server_info` keeps the one with which
the server was started. Neither reports the size of the vocabulary, so sizes are compared where the
server's `config.json` can be read here.
"""

import http.client
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_core.rollout.errors import MalformedReply, NoServers, RequestRefused, ServerDied, WrongServer

ADDRESSES_VARIABLE = "AREAL_LLM_SERVER_ADDRS"
LOGS_VARIABLE = "AREAL_LLM_SERVER_LOGS"
MESSAGE_LIMIT = 500  # characters of a reply in an error message
LINE_LIMIT = 300  # characters of a log line
OLDEST = (0, 5, 0)  # SGLang; older ones do not report the version of their weights in a reply
TOO_NEW = (0, 6, 0)  # the wire format is that of 0.5.23
ASK_TIMEOUT_S = 5.0
# Fields of config.json that must agree between the server's model and the run's.
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")


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
    """Return the end of a log file, indented, without empty lines; very long lines are cut."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - max_bytes))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return "\n".join(f"    {line[:LINE_LIMIT]}" for line in lines[-num_lines:])


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
    """Return the variables from which `servers_from_environment` reads these servers."""
    logs = [str(server.log) for server in servers if server.log is not None]
    return {ADDRESSES_VARIABLE: ",".join(s.address for s in servers), LOGS_VARIABLE: ",".join(logs)}


def call(server: Server, method: str, path: str, payload: Any = None, timeout_s: float = 60.0) -> str:
    """Send one HTTP request; return the body of a 200 reply.

    Raises:
        RequestRefused: another status, or a JSON body with `"success": false`; the message never
            contains the payload.
        OSError: no connection, or no reply in time.
    """
    connection = http.client.HTTPConnection(server.address, timeout=timeout_s)
    try:
        body = None if payload is None else json.dumps(payload)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise ConnectionError(f"{server.address}{path}: {error!r}") from error
    finally:
        connection.close()
    if reply.status != 200 or reports_failure(text):
        raise RequestRefused(
            f"{server.address}{path} answered {reply.status}: {text[:MESSAGE_LIMIT]}", reply.status
        )
    return text


def reports_failure(body: str) -> bool:
    """Return whether a reply is a JSON object with a false `success`.

    SGLang sends some of these with status 200.
    """
    if not body.startswith("{"):
        return False
    return json.loads(body).get("success") is False


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


@dataclass(frozen=True)
class ServerIdentity:
    """The model and options that a server reports."""

    version: str  # of SGLang, or of the SGLang whose routes the server implements
    model_path: str  # the model with which it was started
    architectures: tuple[str, ...]
    weight_version: str  # "default" before the first weight update
    device: str  # "cpu" or "cuda"
    dtype: str  # "auto" if the model's config defines it
    serves_adapters: bool


def ask_identity(server: Server, timeout_s: float = 10.0) -> ServerIdentity:
    """Query the identity of a server.

    Raises:
        WrongServer: it lacks the routes: too old, or not SGLang.
        OSError: it does not answer.
    """
    try:
        model = call(server, "GET", "/model_info", timeout_s=timeout_s)
        started = call(server, "GET", "/server_info", timeout_s=timeout_s)
        return parse_identity(model, started)
    except (MalformedReply, RuntimeError) as error:
        raise WrongServer(
            f"{server.address} is not an SGLang server that this version can use ({error}); start one with sglang 0.5, "
            f"or with areal-debug serve"
        ) from error


def parse_identity(model_info: str, server_info: str) -> ServerIdentity:
    """Parse the two replies. Raises `MalformedReply`, which names the missing field."""
    try:
        model, started = json.loads(model_info), json.loads(server_info)
        return ServerIdentity(
            str(started["version"]),
            str(started["model_path"]),
            tuple(model["architectures"] or ()),
            str(model["weight_version"]),
            str(started["device"]),
            str(started["dtype"]),
            bool(started["enable_lora"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedReply(
            f"/model_info or /server_info is not what SGLang 0.5 sends: {error!r}"
        ) from error


def weight_version(server: Server, timeout_s: float = 5.0) -> str:
    """Query the version of the weights that a server holds.

    Raises:
        OSError, RequestRefused, MalformedReply: no answer, an error, or no version in the reply.
    """
    body = call(server, "GET", "/model_info", timeout_s=timeout_s)
    try:
        return str(json.loads(body)["weight_version"])
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedReply(f"{server.address}/model_info has no weight_version: {body[:200]!r}") from error


def ask_version(server: Server) -> str | None:
    """Query the version of the weights, as `weight_version`; None without a valid answer."""
    try:
        return weight_version(server, ASK_TIMEOUT_S)
    except (OSError, MalformedReply, RequestRefused):
        return None


@dataclass(frozen=True)
class RunModel:
    """The model that a run trains, as described by its checkpoint folder."""

    path: str
    config: dict[str, Any]  # config.json; empty where the path is a hub name
    needs_adapters: bool = False  # the run sends adapters to servers of this model


def run_model(path: str, *, needs_adapters: bool = False) -> RunModel:
    """Read `config.json` of a checkpoint folder."""
    file = Path(path) / "config.json"
    return RunModel(path, json.loads(file.read_text()) if file.is_file() else {}, needs_adapters)


def check_identity(server: Server, identity: ServerIdentity, model: RunModel) -> None:
    """Raise `WrongServer` if the server is of another SGLang release or serves another model."""
    release = tuple(int(number) for number in re.findall(r"\d+", identity.version)[:3])
    if release < OLDEST or release >= TOO_NEW:
        wrong = "too old" if release < OLDEST else "newer than this version knows"
        raise WrongServer(
            f"the server at {server.address} is SGLang {identity.version}, which is {wrong}: use 0.5 (0.5.23 is tested)"
        )
    wanted = tuple(model.config["architectures"] or ()) if "architectures" in model.config else ()
    if wanted and identity.architectures and wanted != identity.architectures:
        raise WrongServer(
            f"the server at {server.address} serves {identity.model_path}, a {' '.join(identity.architectures)}, and the "
            f"run trains {model.path}, a {' '.join(wanted)}: start the server with the run's model"
        )
    served = run_model(identity.model_path).config
    for name in SIZES:
        if name in served and name in model.config and served[name] != model.config[name]:
            raise WrongServer(
                f"the server at {server.address} serves {identity.model_path} with {name} {served[name]}, and the run trains "
                f"{model.path} with {name} {model.config[name]}: start the server with the run's model"
            )
    if model.needs_adapters and not identity.serves_adapters:
        raise WrongServer(
            f"the server at {server.address} was started without --enable-lora, and the run sends adapters: start it with that option, "
            "or set rollout.use_lora and sglang.enable_lora to false"
        )
    if not same_model(identity.model_path, model.path):
        raise WrongServer(
            f"the server at {server.address} serves {identity.model_path}, and the run trains {model.path}: start the server "
            f"with the run's model, or give both paths the same last component if they hold the same files"
        )


def rejection_reason(server: Server, model: RunModel | None) -> str:
    """Return the reason why a discovered server may not serve a run; "" if it may."""
    try:
        if model is not None:
            check_identity(server, ask_identity(server), model)
    except (OSError, WrongServer) as error:
        return str(error)
    return ""


def same_model(one: str, other: str) -> bool:
    """Return whether two paths or hub names can mean the same model.

    Machines may mount one folder in different places, so equal last components suffice.
    """
    return Path(one).resolve() == Path(other).resolve() or Path(one).name == Path(other).name
