"""The health of a server as it reports it itself, for `areal-debug serve --status`.

The time of an answer is that of `/model_info`: `/health` of SGLang samples a token first and then
answers a second later.
"""

import json
import time
from dataclasses import dataclass
from typing import Any

from areal_core.rollout.errors import RequestRefused
from areal_core.servers.server import Server, call, is_healthy

ASK_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ServerHealth:
    """One server now; None where it does not answer, or does not report a number."""

    healthy: bool
    answer_ms: float | None = None
    weight_version: str | None = None
    running: int | None = None  # requests
    waiting: int | None = None


def ask_health(server: Server) -> ServerHealth:
    """Query the health of a server; waits at most some seconds."""
    began = time.monotonic()
    model = reply_of(server, "/model_info")
    if model is None:
        return ServerHealth(healthy=False)
    answer_ms = 1000 * (time.monotonic() - began)
    running, waiting = requests_of(server)
    return ServerHealth(
        healthy=is_healthy(server),
        answer_ms=answer_ms,
        weight_version=str(model["weight_version"]) if "weight_version" in model else None,
        running=running,
        waiting=waiting,
    )


def requests_of(server: Server) -> tuple[int | None, int | None]:
    """Return the running and the waiting requests of all data-parallel ranks of a server."""
    loads = reply_of(server, "/v1/loads?include=core")
    if loads is not None and "loads" in loads:  # SGLang 0.5.23
        ranks = loads["loads"]
        return sum(rank["num_running_reqs"] for rank in ranks), sum(
            rank["num_waiting_reqs"] for rank in ranks
        )
    started = reply_of(server, "/server_info")
    if started is not None and "num_unfinished" in started:  # the embedded server, which queues none
        return int(started["num_unfinished"]), 0
    return None, None


def reply_of(server: Server, path: str) -> dict[str, Any] | None:
    """Return the JSON object of a reply; None without a valid one."""
    try:
        reply = json.loads(call(server, "GET", path, timeout_s=ASK_TIMEOUT_S))
    except (OSError, RequestRefused, ValueError):
        return None
    return reply if isinstance(reply, dict) else None
