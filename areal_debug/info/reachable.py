"""Inference engines, running servers and schedulers that a run could use from here."""

import os
import shutil
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from areal_core.safety.secrets import masker
from areal_debug.serve.state import known_servers

ENGINES = ("sglang", "vllm")
ADDRESSES_VARIABLE = "AREAL_LLM_SERVER_ADDRS"
CONNECT_TIMEOUT_S = 1.0
RAY_ADDRESS_FILE = Path("/tmp/ray/ray_current_cluster")


@dataclass(frozen=True)
class RunningServer:
    """A server: where its address is from, and whether its port accepts a connection."""

    address: str
    source: str
    accepts: bool


@dataclass(frozen=True)
class Reachable:
    """Versions of installed engines, servers, and for each scheduler what of it is here."""

    engines: dict[str, str | None]
    servers: tuple[RunningServer, ...]
    schedulers: dict[str, str | None]


def find_reachable(versions: Mapping[str, str | None]) -> Reachable:
    """Look for engines, servers and schedulers. Each server is connected to, and sent nothing.

    Raises ValueError if another version's `areal-debug serve` wrote the state of a server.
    """
    named = [name.strip() for name in os.environ.get(ADDRESSES_VARIABLE, "").split(",") if name.strip()]
    started = {state.address: "areal-debug serve" for state in known_servers()}
    places = started | dict.fromkeys(named, ADDRESSES_VARIABLE)
    with ThreadPoolExecutor(32) as pool:
        accepting = list(pool.map(accepts, places))
    servers = (RunningServer(*place, ok) for place, ok in zip(places.items(), accepting, strict=True))
    return Reachable(
        engines={name: versions.get(name) for name in ENGINES},
        servers=tuple(servers),
        schedulers=find_schedulers(),
    )


def accepts(address: str) -> bool:
    """Return whether a connection to `host:port` is accepted within a second."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def find_schedulers() -> dict[str, str | None]:
    ray = os.environ.get("RAY_ADDRESS") or (
        RAY_ADDRESS_FILE.read_text().strip() if RAY_ADDRESS_FILE.is_file() else None
    )
    commands = {"SLURM": "srun", "Kubernetes": "kubectl", "ssh": "ssh"}
    return {
        **{name: command if shutil.which(command) else None for name, command in commands.items()},
        "Ray": ray and masker().text(f"a cluster at {ray}"),
    }
