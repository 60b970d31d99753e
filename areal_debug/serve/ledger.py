"""The health ledger of a run: what its clients have seen of each server, written by its rank 0.

{run's logs}/server_health.json   {"updated": TIME, "servers": [{"address": ..., "state": ...}]}
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_debug.newest import newest_first

LEDGER = "server_health.json"
STATES = ("serving", "quarantined", "hung", "lost", "stale")


@dataclass(frozen=True)
class LedgerEntry:
    """One server as the clients of a run have seen it since the run started.

    `rejected_rules` counts the rejected replies by the rule that they broke; `example` is one of
    them. Latencies are those of complete requests; None before the first.
    """

    address: str
    state: str
    requests: int
    ok: int
    errors: int
    rejected: int
    rejected_rules: dict[str, int]
    example: str
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    version: int
    since: str  # ISO time of the change to this state


@dataclass(frozen=True)
class Ledger:
    """The ledger of one run."""

    file: str
    updated: str  # ISO time
    servers: tuple[LedgerEntry, ...]


def find_ledger(logs: Path) -> Ledger | None:
    """Read the newest ledger at or below a folder of logs; None if there is none.

    Raises:
        ValueError: it is not a ledger of this version.
    """
    found = newest_first(logs, LEDGER)
    return read_ledger(found[0]) if found else None


def read_ledger(file: Path) -> Ledger:
    """Parse a ledger. Raises ValueError, which names what is wrong."""
    try:
        content = json.loads(file.read_text())
        entries = tuple(parse_entry(server) for server in content["servers"])
        return Ledger(str(file), str(content["updated"]), entries)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} is not a health ledger of this version: {error!r}") from error


def parse_entry(server: dict[str, Any]) -> LedgerEntry:
    """Parse one server. Raises KeyError, TypeError or ValueError."""
    if server["state"] not in STATES:
        raise ValueError(f"state is {server['state']!r}; expected one of {', '.join(STATES)}")
    return LedgerEntry(
        address=str(server["address"]),
        state=server["state"],
        requests=int(server["requests"]),
        ok=int(server["ok"]),
        errors=int(server["errors"]),
        rejected=int(server["rejected"]),
        rejected_rules={str(rule): int(count) for rule, count in server["rejected_rules"].items()},
        example=str(server["example"] or ""),
        p50_ms=milliseconds(server["p50_ms"]),
        p95_ms=milliseconds(server["p95_ms"]),
        p99_ms=milliseconds(server["p99_ms"]),
        version=int(server["version"]),
        since=str(server["since"]),
    )


def milliseconds(value: Any) -> float | None:
    """Return a latency; None if there is none yet."""
    return None if value is None else float(value)
