"""What a run knows of each server: may it get requests, and what has it answered so far.

    serving ----- 3 queries of its version without an answer ------------> hung         answers again
       |  \\------ it refuses connections ---------------------------------> lost         the same
       |   \\----- it holds older weights, as after a restart -------------> stale        is updated
       |    \\---- a reply breaks a rule (`reply.py`), or it fails often --> quarantined  a trial passes
       +--- it asks for a delay (429, Retry-After): no requests for that time, and still serving

All changes of a state are logged here, once each, however many requests a change concerns. State
belongs to one client; its event loop and the trainer's thread both change it, so a lock guards it.
"""

import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from areal_core.safety.durable import commit_file
from areal_core.servers.reply import parse_version
from areal_core.servers.server import Server

MAX_MISSES = 3  # queries in a row without an answer, after which requests go to other servers
QUARANTINE_S = 5.0  # the first time; twice as long each further time
LONGEST_QUARANTINE_S = 600.0
BACK_OFF_S = 1.0  # after the first 429 without Retry-After; twice as long after each further one
LONGEST_BACK_OFF_S = 300.0
LATENCIES = 1024  # of the last replies, for percentiles
# A reply is slow that took so long, and so many times as long for each token as most replies.
SLOW_S, SLOW_FACTOR = 2.0, 10.0
EXAMPLE_CHARS = 300
logger = logging.getLogger(__name__)


class State(StrEnum):
    """Whether a server gets requests: only a serving one does."""

    SERVING = "serving"
    STALE = "stale"
    HUNG = "hung"
    LOST = "lost"
    QUARANTINED = "quarantined"


@dataclass
class ServerRecord:
    """The state of one server, and the counts of its requests."""

    server: Server
    state: State = State.SERVING
    since: float = field(default_factory=time.time)
    misses: int = 0
    version: str = ""  # as it last reported; "" before
    requests: int = 0
    ok: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)  # by the rule that a reply broke
    example: str = ""  # of the last rejected reply
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCIES))
    slow: int = 0
    replied_at: float = 0.0  # monotonic, of the last valid reply
    num_quarantines: int = 0
    delays: int = 0
    num_delays: int = 0  # since its last valid reply
    busy_until: float = 0.0  # monotonic
    trial_at: float = 0.0  # monotonic, of a quarantined server

    def faults(self) -> Counter[str]:
        """Count rejected replies by rule, else requests without a reply; and slow ones.

        The requests of a server whose replies are rejected are broken off by this side.
        """
        return (self.rejected or self.errors) + Counter(slow=self.slow)

    def document(self) -> dict[str, Any]:
        """Return the record as JSON types; latencies in milliseconds."""
        latencies = sorted(self.latencies_s)
        return {
            "address": self.server.address,
            "state": str(self.state),
            "since": datetime.fromtimestamp(self.since, UTC).isoformat(timespec="seconds"),
            "version": self.version,
            "requests": self.requests,
            "ok": self.ok,
            "slow": self.slow,
            "errors": dict(self.errors),
            "rejected": self.rejected.total(),
            "rejected_rules": dict(self.rejected),
            "example": self.example,
            **{f"p{p}_ms": round(1000 * percentile(latencies, p), 1) for p in (50, 95, 99)},
        }


class Health:
    """The records of all servers that a client knows."""

    def __init__(self, servers: Iterable[Server]) -> None:
        self._lock = threading.Lock()
        self._records = {server: ServerRecord(server) for server in servers}
        self._latencies_s: deque[float] = deque(maxlen=LATENCIES)  # of all servers
        self._token_times_s: deque[float] = deque(maxlen=LATENCIES)

    def record(self, server: Server) -> ServerRecord:
        """Return a server's record; a new one is stale until it reports the current weights."""
        with self._lock:
            return self._records.setdefault(server, ServerRecord(server, State.STALE))

    def records(self) -> list[ServerRecord]:
        with self._lock:
            return list(self._records.values())

    def serving(self) -> list[Server]:
        """Return the servers that may get requests now."""
        now = time.monotonic()
        return [r.server for r in self.records() if r.state is State.SERVING and r.busy_until <= now]

    def keep(self, known: Iterable[Server]) -> None:
        """Note which servers are known; the others are lost, their records stay."""
        with self._lock:
            for server in self._records.keys() - set(known):
                self._set(self._records[server], State.LOST, "it is not registered any more")

    def replied(self, server: Server, seconds: float, num_tokens: int = 1) -> None:
        """Count a valid reply."""
        record, token_s = self.record(server), seconds / max(num_tokens, 1)
        with self._lock:
            if seconds > SLOW_S and token_s > SLOW_FACTOR * percentile(sorted(self._token_times_s), 50) > 0:
                record.slow += 1
                if record.slow == 1:
                    logger.warning(
                        "inference server %s: a reply of %d tokens took %.1f s, and is slow",
                        *(record.server.address, num_tokens, seconds),
                    )
            self._token_times_s.append(token_s)
            record.ok += 1
            record.num_delays = 0
            record.latencies_s.append(seconds)
            self._latencies_s.append(seconds)
            record.replied_at = time.monotonic()

    def failed(self, server: Server, kind: str) -> None:
        """Count a request without a reply."""
        record = self.record(server)
        with self._lock:
            record.errors[kind] += 1
            # other failures change a state, which is logged
            is_unseen = kind == "TimeoutError" or kind.startswith("http_5")
            if is_unseen and record.errors[kind] == 1 and record.state is State.SERVING:
                logger.warning(
                    "inference server %s: %s for the first time, in request %d",
                    *(record.server.address, kind, record.requests),
                )

    def delayed(self, server: Server, status: int, retry_after_s: float | None) -> float:
        """Send no request for the time that a server asks for; return the seconds."""
        record = self.record(server)
        with self._lock:
            wanted_s = BACK_OFF_S * 2**record.num_delays if retry_after_s is None else retry_after_s
            delay_s = min(wanted_s, LONGEST_BACK_OFF_S)
            record.num_delays = min(record.num_delays + 1, 16)
            if record.delays == 0:
                logger.warning(
                    "inference server %s asks for a delay (status %d): no requests for %.0f s",
                    *(server.address, status, delay_s),
                )
            record.delays += 1
            record.busy_until = max(record.busy_until, time.monotonic() + delay_s)
            return delay_s

    def rejected(self, server: Server, rule: str, example: str, *, is_trial: bool = False) -> None:
        """Count a reply that breaks a rule, and quarantine its server, or prolong that."""
        record = self.record(server)
        with self._lock:
            record.rejected[rule] += 1
            record.example = example[:EXAMPLE_CHARS]
            if record.state is State.SERVING or is_trial:
                seconds = min(QUARANTINE_S * 2**record.num_quarantines, LONGEST_QUARANTINE_S)
                record.num_quarantines += 1
                record.trial_at = time.monotonic() + seconds
                self._set(
                    record, State.QUARANTINED, f"{record.example}; its next trial is in {seconds:.0f} s"
                )

    def change(self, server: Server, state: State, reason: str) -> None:
        """Set the state of a server; the reason is logged."""
        record = self.record(server)
        with self._lock:
            self._set(record, state, reason)

    def missed(self, server: Server, reason: str) -> None:
        """Count a query without an answer."""
        record = self.record(server)
        with self._lock:
            record.misses += 1
            if record.misses >= MAX_MISSES and record.state is not State.LOST:
                self._set(record, State.HUNG, f"{record.misses} queries without an answer, {reason}")

    def answered(self, server: Server, version: str, current: int, first: int) -> bool:
        """Note the weight version that a server reports; return whether it is the current one.

        Args:
            current: version that a server must hold, at least, to be used.
            first: version that a server holds before its first weight update.
        """
        record = self.record(server)
        number = parse_version(version)
        is_current = current == first if number is None else number >= current
        with self._lock:
            record.misses, record.version = 0, version
            if not is_current and record.state is not State.QUARANTINED:
                self._set(record, State.STALE, f"it holds version {version!r}, and the run is at {current}")
        return is_current

    def approved(self, server: Server) -> None:
        """Use a server that answers and has the current weights, unless it is in quarantine."""
        record = self.record(server)
        with self._lock:
            if record.state is not State.QUARANTINED:
                self._set(record, State.SERVING, "it answers, with the current weights")

    def _set(self, record: ServerRecord, state: State, reason: str) -> None:
        if record.state is state:
            return
        was, record.state, record.since = record.state, state, time.time()
        left = sum(other.state is State.SERVING for other in self._records.values())
        log = logger.info if (was, state) == (State.STALE, State.SERVING) else logger.warning
        where = record.server.describe() if state is State.LOST else record.server.address
        log("inference server %s: %s (%s); %d serving", state, where, reason, left)

    def summary(self) -> dict[str, float]:
        """Return statistics over all servers, for the log of a step."""
        records = self.records()
        states = Counter(record.state for record in records)
        latencies = sorted(self._latencies_s)
        return {
            "servers_serving": states[State.SERVING],
            "servers_quarantined": states[State.QUARANTINED],
            "servers_gone": states[State.HUNG] + states[State.LOST],
            "replies_rejected": sum(record.rejected.total() for record in records),
            "requests_failed": sum(record.errors.total() for record in records),
            **{f"latency_p{p}_s": percentile(latencies, p) for p in (50, 95, 99)},
        }

    def document(self) -> dict[str, Any]:
        """Return all records as JSON types."""
        updated = datetime.now(UTC).isoformat(timespec="seconds")
        return {"updated": updated, "servers": [record.document() for record in self.records()]}

    def write(self, file: Path) -> None:
        """Replace `file` with the document."""
        commit_file(file, json.dumps(self.document(), indent=1))

    def lines(self) -> list[str]:
        """Return what happened with each server that had a fault, in one line each."""
        return [
            f"{record.server.address} {record.state}: {record.ok} of {record.requests} requests answered"
            + "".join(f", {fault} x{count}" for fault, count in record.faults().most_common())
            + (f"; the last: {record.example}" if record.example else "")
            for record in self.records()
            if record.faults() or record.state not in (State.SERVING, State.STALE)
        ]


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return a percentile of sorted values by the nearest rank; 0 of no values."""
    return ordered[min(len(ordered) - 1, percent * len(ordered) // 100)] if ordered else 0.0
