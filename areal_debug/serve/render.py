"""Print the reports of `areal-debug serve`: a server's properties, and the known servers."""

import datetime
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_core.environment import ADDRESSES_VARIABLE
from areal_core.servers.server import Server
from areal_debug.render import format_seconds, one_line
from areal_debug.serve.facts import ServerFacts, worth_checking
from areal_debug.serve.health import ServerHealth, ask_health
from areal_debug.serve.ledger import Ledger, LedgerEntry
from areal_debug.serve.state import ServerState

STYLES = {"ready": "green", "starting": "yellow", "serving": "green", "stale": "yellow"}
HEALTH = ("answers in", "weights", "requests")
LATENCIES = ("p50", "p95", "p99")


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


def print_facts(out: Console, facts: ServerFacts, state: ServerState) -> None:
    """Print what runs, what to check, and the address, last and on a line of its own."""
    out.print(one_line(f"{facts.version} serves {facts.model_path} on {facts.device}", style="bold"))
    for name, value in shown_facts(facts, state).items():
        out.print(one_line(f"  {name:<16}", style="dim") + one_line(value))
    for note in worth_checking(facts):
        out.print(one_line("  check           ", style="yellow") + one_line(note))
    out.print(one_line(address_line(facts.address)))


def shown_facts(facts: ServerFacts, state: ServerState) -> dict[str, str]:
    sampling = ", ".join(f"{name} {value:g}" for name, value in facts.model_sampling.items())
    return {
        "weights": f"version {facts.weight_version}",
        "context length": "-" if facts.context_length is None else f"{facts.context_length:,} tokens",
        "dtype": facts.dtype,
        "input": {True: "text and images", False: "text only", None: "text"}[facts.multimodal],
        "sampling": f"defaults of {facts.sampling_defaults or 'the engine'}"
        + (f"; the model's own: {sampling}" if sampling else ""),
        "attention": f"{facts.attention_backend or '-'}, {facts.tensor_size} rank{'s' * (facts.tensor_size != 1)}",
        "log": state.log,
        **({"joined": state.run} if state.run else {}),
    }


def facts_document(facts: ServerFacts, state: ServerState) -> dict[str, Any]:
    """Return the same properties as JSON types."""
    return {
        "address": facts.address,
        "environment": address_line(facts.address),
        "server": asdict(facts),
        "state": asdict(state),
        "worth_checking": worth_checking(facts),
    }


def print_statuses(out: Console, statuses: list[ServerStatus]) -> None:
    """Print one line per server, then the messages of those with problems."""
    if not statuses:
        out.print("no known server: start one with `areal-debug serve --model M --background`")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("address", "state", "engine", "up", *HEALTH, "joined", "model", "log"):
        table.add_column(heading)
    for status in statuses:
        state = status.state
        up = format_seconds(time.time() - state.keeper_started) if status.is_well else "-"
        table.add_row(
            state.address,
            one_line(status.now, style=STYLES.get(status.now, "red")),
            state.engine,
            up,
            *health_cells(status.health),
            state.run or "-",
            one_line(os.path.relpath(state.model) if len(state.model) > 60 else state.model),
            one_line(state.log),
        )
    out.print(table)
    for status in statuses:
        if status.state.message:
            out.print(one_line(f"{status.state.address} {status.state.message}", style="red"))
    ready = [status.state.address for status in statuses if status.now == "ready"]
    if ready:
        out.print(one_line(address_line(",".join(ready))))


def health_cells(health: ServerHealth | None) -> list[str]:
    if health is None:
        return ["-"] * len(HEALTH)
    requests = f"{shown(health.running)} running, {shown(health.waiting)} waiting"
    return [shown(health.answer_ms, " ms"), shown(health.weight_version), requests]


def shown(value: float | str | None, unit: str = "") -> str:
    """Return a value with its unit, or `-`."""
    if value is None:
        return "-"
    return f"{value:,.0f}{unit}" if isinstance(value, float) else f"{value}{unit}"


def print_ledger(out: Console, ledger: Ledger) -> None:
    """Print what a run has seen of its servers: one line each, then the replies it rejected."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in (
        "address",
        "state",
        "since",
        "version",
        "requests",
        "ok",
        "errors",
        "rejected",
        *LATENCIES,
    ):
        table.add_column(heading, justify="left" if heading in ("address", "state", "since") else "right")
    for entry in ledger.servers:
        table.add_row(*ledger_cells(entry))
    out.print()
    out.print(one_line(f"servers as the run sees them, {ago(ledger.updated)} ({ledger.file})", style="bold"))
    out.print(table)
    for entry in ledger.servers:
        if entry.errors:
            out.print(one_line(f"{entry.address} errors: {listed(entry.errors)}", style="yellow"))
        if entry.rejected:
            rejected = f"{listed(entry.rejected_rules)}; the last: {entry.example}"
            out.print(one_line(f"{entry.address} rejected replies: {rejected}", style="red"))


def listed(counts: dict[str, int]) -> str:
    """Return counts as `name 3 times, other 1 times`."""
    return ", ".join(f"{name} {count:,} times" for name, count in counts.items())


def ledger_cells(entry: LedgerEntry) -> list[Text]:
    numbers = (entry.requests, entry.ok, sum(entry.errors.values()), entry.rejected)
    counts = [entry.version or "-", *(f"{number:,}" for number in numbers)]
    latencies = [shown(ms, " ms") for ms in (entry.p50_ms, entry.p95_ms, entry.p99_ms)]
    state = one_line(entry.state, style=STYLES.get(entry.state, "red"))
    return [one_line(entry.address), state, one_line(ago(entry.since)), *map(one_line, (*counts, *latencies))]


def ago(moment: str) -> str:
    """Return an ISO time as `5 s ago`; the text itself if it is no time."""
    try:
        then = datetime.datetime.fromisoformat(moment)
    except ValueError:
        return moment
    return f"{format_seconds(max(0.0, time.time() - then.timestamp()))} ago"


def statuses_document(statuses: list[ServerStatus], ledger: Ledger | None) -> dict[str, Any]:
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
