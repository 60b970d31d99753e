"""Report of `areal-debug serve`: a server, or the known servers."""

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
from areal_debug.serve.state import ServerState

LEVELS: dict[str, Level] = {"ready": "good", "starting": "unsure"}
STATUS_HEADINGS = (
    "address", "state", "engine", "up", "answers in", "weights", "requests", "joined", "model", "log",
)  # fmt: skip
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


def report_of_all(statuses: Sequence[ServerStatus], num_elsewhere: int = 0) -> Report:
    """Return a row a server, and the messages of those with problems; others are counted."""
    elsewhere = [f"{count(num_elsewhere, 'server')} of other folders: --all lists them"] * bool(num_elsewhere)
    if not statuses:
        start = "start one with `areal-debug serve --model M --background`"
        return Report("No known server", start, "", notes=elsewhere)
    messages = (
        f"{s.state.address} {s.state.message.splitlines()[-1].strip()}" for s in statuses if s.state.message
    )
    blocks: list[Block] = [
        Table(STATUS_HEADINGS, [status_cells(status) for status in statuses]),
        Facts(rows_of("failed", list(messages), "bad")),
    ]
    if ready := [status.state.address for status in statuses if status.now == "ready"]:
        blocks.append(address_line(",".join(ready)))
    verdict = verdict_of(statuses)
    num_ready = sum(status.now == "ready" for status in statuses)
    return Report(
        verdict, f"{num_ready} of {count(len(statuses), 'server')} ready", WORDS[verdict], blocks, elsewhere
    )


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
    if value is None:
        return "-"
    return f"{value:,.0f}{unit}" if isinstance(value, float) else f"{value}{unit}"


def document_of_all(statuses: Sequence[ServerStatus]) -> dict[str, Any]:
    """Return the same states as JSON types."""
    ready = [status.state.address for status in statuses if status.now == "ready"]
    return {
        "servers": [
            asdict(status.state) | {"now": status.now, "health": status.health and asdict(status.health)}
            for status in statuses
        ],
        "environment": address_line(",".join(ready)) if ready else None,
    }
