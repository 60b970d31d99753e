"""The servers that ranks wait for: which are busy while ranks wait, and with how many requests.

A server is found by the connection of a rank that waits, or as an engine of the job. It is busy
while one of its threads handles a request or runs a model. The number of running requests is that
of its metrics page, where it has one, else of the threads that handle one.
"""

import re
import urllib.error
import urllib.request
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Literal

from hangdoctor.collect import pyspy
from hangdoctor.collect.process import descendants, listeners, listening_ports, process_table, sockets
from hangdoctor.errors import UnreadableDump
from hangdoctor.frames import last_name
from hangdoctor.model import Confidence, Thread
from hangdoctor.parse.stacks_json import parse_stacks_json
from hangdoctor.slow.phases import place_of
from hangdoctor.slow.sample import Observation

HANDLES_REQUEST = re.compile("do_POST|do_GET|do_PUT")
RUNS_MODEL = re.compile(
    r"run_batch|execute_model|\w*forward\w*|_?generate\w*|_?decode\w*|_?prefill\w*|step(_with_batch_queue)?"
)
RUNNING_REQUESTS = re.compile(
    r"^(?:sglang:num_running_reqs|vllm:num_requests_running)(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE
)
METRICS_TIMEOUT_S = 0.3
MAX_METRICS_BYTES = 1 << 20
MAX_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class Load:
    """One server in one round. `num_requests` is None where nothing shows it."""

    busy: bool
    num_requests: int | None
    place: str


@dataclass(slots=True)
class Engine:
    """One server. `pids` are its process and those below it, `loads` go by round, `clients` are
    the ranks that were connected to it in a rollout.
    """

    name: str
    pids: tuple[int, ...]
    ports: frozenset[int]
    loads: dict[int, Load] = field(default_factory=dict)
    clients: set[str] = field(default_factory=set)
    has_metrics: bool = True


def find_engines(pids: Iterable[int], ports: Container[int], ranks: Sequence[int]) -> list[Engine]:
    """Return the servers with these pids and those that listen on these ports, except for `ranks`,
    which listen for each other, and their launcher.
    """
    table = process_table()
    wanted = listeners(ranks[0], ports) if ranks else set()
    roots = {*pids}
    if wanted:
        others = [pid for pid, process in table.items() if process.is_python and pid not in ranks]
        roots |= {pid for pid in others if sockets(pid) & wanted}
    below = {pid: descendants([pid], table) for pid in roots}
    inner = {child for pid in roots for child in below[pid]}
    engines = []
    for pid in sorted(roots - inner):
        tree = (pid, *[child for child in below[pid] if child not in ranks][:MAX_PROCESSES])
        listening = frozenset(port for one in tree for port in listening_ports(one))
        name = f"engine on port {min(listening)}" if listening else f"engine with pid {pid}"
        engines.append(Engine(name, tree, listening))
    return engines


def look_at(engine: Engine, tool: str, round_number: int, timeout_s: float) -> None:
    """Add the load of one server in this round, where it can be read."""
    threads: list[Thread] = []
    for pid in engine.pids:
        done = pyspy.dump_once(tool, pid, timeout_s)
        if done.status == "dumped":
            try:
                threads += parse_stacks_json(done.output)[1]
            except UnreadableDump:  # it moved while it was read
                return
    if threads:
        engine.loads[round_number] = load_of(threads, metrics_requests(engine))


def load_of(threads: Sequence[Thread], num_requests: int | None) -> Load:
    handling = [thread for thread in threads if calls(thread, HANDLES_REQUEST)]
    computing = [thread for thread in threads if calls(thread, RUNS_MODEL)]
    if num_requests is None:
        num_requests = len(handling) or (None if computing else 0)
    working = computing or handling
    busy = bool(working) if num_requests is None else num_requests > 0
    return Load(busy, num_requests, place_of(working[0].frames) if working else "")


def calls(thread: Thread, functions: re.Pattern[str]) -> bool:
    """True if a thread is inside a function whose name matches."""
    return any(functions.fullmatch(last_name(frame.function)) for frame in thread.frames)


def metrics_requests(engine: Engine) -> int | None:
    """Return the number of running requests of the server's metrics page, None without one."""
    if not engine.has_metrics:
        return None
    for port in sorted(engine.ports):
        try:
            url = f"http://127.0.0.1:{port}/metrics"
            with urllib.request.urlopen(url, timeout=METRICS_TIMEOUT_S) as response:
                text = response.read(MAX_METRICS_BYTES).decode(errors="replace")
        except (OSError, ValueError, urllib.error.URLError):
            continue
        if found := RUNNING_REQUESTS.findall(text):
            return round(sum(float(value) for value in found))
    engine.has_metrics = False
    return None


STANDS_OUT = 0.5
"""Difference of the busy shares of two servers."""
LEAST_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Blame:
    """The server that ranks wait for, or a long prompt. `engine` is empty where it changes."""

    label: Literal["slow_engine", "long_prompt"]
    confidence: Confidence
    engine: str
    sentence: str
    evidence: tuple[str, ...]


def blame_server(seen: Observation, late: set[int]) -> Blame | None:
    """Return the server that holds the ranks, or a long prompt; None where nothing stands out.

    Args:
        seen: all rounds.
        late: indices of the tracks of ranks that are late, empty where all wait or it changes.
    """
    tail = tail_rounds(seen, late)
    engines = [engine for engine in seen.engines if engine.loads]
    if len(tail) < LEAST_ROUNDS or not any(busy_share(engine, tail) for engine in engines):
        return None
    busy = {engine.name: busy_share(engine, tail) for engine in engines}
    ordered = sorted(engines, key=lambda engine: -busy[engine.name])
    facts = tuple(
        f"{engine.name}: busy in {100 * busy[engine.name]:.0f} % of the moments in which ranks wait for "
        f"rollouts, with {requests_in(engine, tail):g} of up to {peak_requests(engine)} requests"
        for engine in ordered
    )
    first = ordered[0]
    is_alone = len(ordered) > 1 and busy[first.name] - busy[ordered[1].name] >= STANDS_OUT
    if not is_alone and len(ordered) > 1:
        return long_prompts_in_turn(ordered, tail, facts)
    if requests_in(first, tail) <= 1 < peak_requests(first):
        sentence = (
            f"One long prompt on {first.name} holds the job, not the engine: its other requests are done."
        )
        return Blame("long_prompt", "medium", first.name, sentence, facts)
    if not is_alone:
        return None
    certain = peak_requests(first) > 1
    sentence = f"{first.name.capitalize()} is slow" + (
        "." if certain else ", or its only request is long: one request at a time does not separate the two."
    )
    return Blame("slow_engine", "high" if certain else "low", first.name, sentence, facts)


def tail_rounds(seen: Observation, late: set[int]) -> list[int]:
    """Return the rounds in which ranks wait for rollouts: late ones if known, and all others of
    them wait in collectives, if enough rounds are like that.
    """
    waiting, alone = [], []
    for index, row in enumerate(zip(*(track.activities for track in seen.tracks), strict=True)):
        requesting = {i for i, a in enumerate(row) if a is not None and a.phase == "rollout"}
        if not requesting or (late and not requesting & late):
            continue
        waiting.append(index)
        if sum(a is not None and a.waits for a in row) * 2 >= len(row):
            alone.append(index)
    return alone if len(alone) >= LEAST_ROUNDS else waiting


def busy_share(engine: Engine, rounds: Sequence[int]) -> float:
    loads = [engine.loads[index] for index in rounds if index in engine.loads]
    return mean(load.busy for load in loads) if loads else 0.0


def requests_in(engine: Engine, rounds: Sequence[int]) -> float:
    loads = [engine.loads[index] for index in rounds if index in engine.loads]
    return median([load.num_requests or 1 for load in loads if load.busy] or [0])


def peak_requests(engine: Engine) -> int:
    seen = max((load.num_requests or int(load.busy) for load in engine.loads.values()), default=0)
    return max(seen, len(engine.clients))


def long_prompts_in_turn(
    engines: Sequence[Engine], tail: Sequence[int], facts: tuple[str, ...]
) -> Blame | None:
    """Return the verdict where one request after the other is the last on changing servers."""
    total = [
        sum(e.loads[i].num_requests or int(e.loads[i].busy) for e in engines if i in e.loads) for i in tail
    ]
    peak = max(
        sum(e.loads[i].num_requests or int(e.loads[i].busy) for e in engines if i in e.loads)
        for i in range(max(max(e.loads) for e in engines if e.loads) + 1)
    )
    if peak < 2 or median(total) > 1:
        return None
    sentence = f"A long prompt at a time holds the job: the last of up to {peak} requests runs alone."
    return Blame("long_prompt", "medium", "", sentence, facts)
