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

from hangdoctor.collect import pyspy
from hangdoctor.collect.process import descendants, listeners, listening_ports, process_table, sockets
from hangdoctor.errors import UnreadableDump
from hangdoctor.frames import last_name
from hangdoctor.model import Thread
from hangdoctor.parse.stacks_json import parse_stacks_json
from hangdoctor.slow.phases import place_of

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
