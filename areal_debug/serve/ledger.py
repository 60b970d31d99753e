"""The health ledger of a run: what its clients have seen of each server, written by its rank 0.

{run's logs}/server_health.json   {"updated": TIME, "servers": [{"address": ..., "state": ...}]}
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_core.servers.health import State
from areal_debug.newest import newest_first

LEDGER = "server_health.json"


@dataclass(frozen=True)
class LedgerEntry:
    """One server as the client of a run has seen it since the run started."""

    address: str
    state: State
    requests: int
    ok: int
    errors: dict[str, int]  # by kind
    rejected: int
    rejected_rules: dict[str, int]  # replies by the rule that they broke
    slow: int  # replies
    example: str  # of the last rejected reply
    p50_ms: float
    p95_ms: float
    p99_ms: float
    version: str  # of the weights, as the server last reported it
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
    return LedgerEntry(
        address=str(server["address"]),
        state=State(server["state"]),
        requests=int(server["requests"]),
        ok=int(server["ok"]),
        errors=counts_of(server["errors"]),
        rejected=int(server["rejected"]),
        rejected_rules=counts_of(server["rejected_rules"]),
        slow=int(server.get("slow", 0)),  # older clients did not count them
        example=str(server["example"]),
        p50_ms=float(server["p50_ms"]),
        p95_ms=float(server["p95_ms"]),
        p99_ms=float(server["p99_ms"]),
        version=str(server["version"]),
        since=str(server["since"]),
    )


def counts_of(counts: dict[str, Any]) -> dict[str, int]:
    return {str(name): int(count) for name, count in counts.items()}
