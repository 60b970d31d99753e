"""Report of `areal-debug serve`: a server, the known servers, a run's view of them."""

import datetime
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from areal_core.environment import ADDRESSES_VARIABLE
from areal_core.servers.server import Server
from areal_debug.render import count, format_seconds
from areal_debug.report.model import Block, Cell, Facts, Level, Report, Row, Table, rows_of
from areal_debug.serve.facts import ServerFacts, worth_checking
from areal_debug.serve.health import ServerHealth, ask_health
from areal_debug.serve.ledger import Ledger, LedgerEntry
from areal_debug.serve.state import ServerState

LEVELS: dict[str, Level] = {"ready": "good", "starting": "unsure", "serving": "good", "stale": "unsure"}
STATUS_HEADINGS = (
    "address",
    "state",
    "engine",
    "up",
    "answers in",
    "weights",
    "requests",
    "joined",
    "model",
    "log",
)
LEDGER_HEADINGS = ("address", "state", "since", "version>", "requests>", "ok>", "errors", "rejected", "p50 / p95 / p99 ms>")  # fmt: skip
LONGEST_PATH = 60


@dataclass(frozen=True)
class ServerStatus:
    """A known server and its current state.

    `now` is ready, starting, not answering, failed, or gone (killed with its keeper). `health` is
    what it answers; None unless it should.
    """

    state: ServerState
    now: str
    health: ServerHealth | None = None

    @property
    def is_well(self) -> bool:
        """True if the server is ready or starting."""
        return self.now in ("ready", "starting")


def status_of(state: ServerState) -> ServerStatus:
    """Determine the state of a server from its keeper process and its health check."""
    if state.phase == "failed":
        return ServerStatus(state, "failed")
    if not state.keeper_lives:
        return ServerStatus(state, "gone")
    if state.phase == "starting":
        return ServerStatus(state, "starting")
    health = ask_health(Server(state.address))
    return ServerStatus(state, "ready" if health.healthy else "not answering", health)


def address_line(address: str) -> str:
    """Return the environment variable with which another process uses the server."""
    return f"{ADDRESSES_VARIABLE}={address}"


def report_of_server(facts: ServerFacts, state: ServerState) -> Report:
    """Return what runs, what to check, and the address, last and on a line of its own."""
    sampling = ", ".join(f"{name} {value:g}" for name, value in facts.model_sampling.items())
    rows = [
        Row("weights", f"version {facts.weight_version}"),
        Row("context", "-" if facts.context_length is None else f"{facts.context_length:,} tokens"),
        Row("dtype", facts.dtype),
        Row("input", {True: "text and images", False: "text only", None: "text"}[facts.multimodal]),
        Row(
            "sampling",
            f"defaults of {facts.sampling_defaults or 'the engine'}"
            + (f"; the model's own: {sampling}" if sampling else ""),
        ),
        Row("attention", f"{facts.attention_backend or '-'}, {count(facts.tensor_size, 'rank')}"),
        Row("log", state.log),
        *([Row("joined", state.run)] if state.run else []),
        *rows_of("check", worth_checking(facts), "unsure"),
    ]
    sentence = f"{facts.version} serves {facts.model_path} on {facts.device}"
    return Report("Ready", sentence, "good", [Facts(rows), address_line(facts.address)])


def document_of_server(facts: ServerFacts, state: ServerState) -> dict[str, Any]:
    """Return the same properties as JSON types."""
    return {
        "address": facts.address,
        "environment": address_line(facts.address),
        "server": asdict(facts),
        "state": asdict(state),
        "worth_checking": worth_checking(facts),
    }


def report_of_all(statuses: Sequence[ServerStatus], ledger: Ledger | None) -> Report:
    """Return a row a server, the messages of those with problems, and the view of a run."""
    blocks: list[Block] = []
    if statuses:
        blocks.append(Table(STATUS_HEADINGS, [status_cells(status) for status in statuses]))
        messages = (f"{s.state.address} {s.state.message}" for s in statuses if s.state.message)
        blocks.append(Facts(rows_of("failed", list(messages), "bad")))
        if ready := [status.state.address for status in statuses if status.now == "ready"]:
            blocks.append(address_line(",".join(ready)))
    if ledger is not None:
        blocks += [ledger_table(ledger), Facts(problem_rows(ledger))]
    if not statuses:
        start = "start one with `areal-debug serve --model M --background`"
        return Report("No known server", start, "", blocks)
    verdict = verdict_of(statuses)
    num_ready = sum(status.now == "ready" for status in statuses)
    return Report(verdict, f"{num_ready} of {count(len(statuses), 'server')} ready", WORDS[verdict], blocks)


WORDS: dict[str, Level] = {"Healthy": "good", "Starting": "unsure", "Problem": "bad"}


def verdict_of(statuses: Sequence[ServerStatus]) -> str:
    """Return a key of WORDS: that of the worst server."""
    if not all(status.is_well for status in statuses):
        return "Problem"
    return "Healthy" if all(status.now == "ready" for status in statuses) else "Starting"


def status_cells(status: ServerStatus) -> list[str | Cell]:
    state, health = status.state, status.health
    up = format_seconds(time.time() - state.keeper_started) if status.is_well else "-"
    answers = ["-"] * 3
    if health is not None:
        requests = f"{shown(health.running)} running, {shown(health.waiting)} waiting"
        answers = [shown(health.answer_ms, " ms"), shown(health.weight_version), requests]
    model = os.path.relpath(state.model) if len(state.model) > LONGEST_PATH else state.model
    cell = Cell(status.now, LEVELS.get(status.now, "bad"))
    return [state.address, cell, state.engine, up, *answers, state.run or "-", model, state.log]


def shown(value: float | str | None, unit: str = "") -> str:
    """Return a value with its unit, or `-`."""
    if value is None:
        return "-"
    return f"{value:,.0f}{unit}" if isinstance(value, float) else f"{value}{unit}"


def ledger_table(ledger: Ledger) -> Table:
    """Return what a run has seen of its servers, a row each."""
    title = f"servers as the run sees them, {ago(ledger.updated)} ({ledger.file})"
    return Table(LEDGER_HEADINGS, [ledger_cells(entry) for entry in ledger.servers], title)


def ledger_cells(entry: LedgerEntry) -> list[str | Cell]:
    counts = (entry.version or "-", f"{entry.requests:,}", f"{entry.ok:,}")
    errors = ", ".join(f"{number:,} {name}" for name, number in entry.errors.items())
    rejected = ", ".join(f"{number:,} {name}" for name, number in entry.rejected_rules.items())
    latencies = " / ".join(shown(ms) for ms in (entry.p50_ms, entry.p95_ms, entry.p99_ms))
    state = Cell(str(entry.state), LEVELS.get(entry.state, "bad"))
    return [entry.address, state, ago(entry.since), *counts, errors, Cell(rejected, "bad"), latencies]


def problem_rows(ledger: Ledger) -> list[Row]:
    """Return the last rejected reply of each server."""
    return [
        Row("rejected", f"{entry.address}: {entry.rejected:,} replies; the last: {entry.example}", "bad")
        for entry in ledger.servers
        if entry.rejected
    ]


def ago(moment: str) -> str:
    """Return an ISO time as `5 s ago`; the text itself if it is no time."""
    try:
        then = datetime.datetime.fromisoformat(moment)
    except ValueError:
        return moment
    return f"{format_seconds(max(0.0, time.time() - then.timestamp()))} ago"


def document_of_all(statuses: Sequence[ServerStatus], ledger: Ledger | None) -> dict[str, Any]:
    """Return the same states as JSON types; `ledger` is null without one."""
    ready = [status.state.address for status in statuses if status.now == "ready"]
    return {
        "servers": [
            asdict(status.state) | {"now": status.now, "health": status.health and asdict(status.health)}
            for status in statuses
        ],
        "ledger": ledger and asdict(ledger),
        "environment": address_line(",".join(ready)) if ready else None,
    }
