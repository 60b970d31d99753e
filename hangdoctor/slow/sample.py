"""Rounds of stacks of a running job: nonblocking py-spy of every rank, /proc beside each.

    find_job ─> round 0 ─(pause)─> round 1 ... until the time is over
                  └ thread pool: each thread waits for one py-spy, and a time-out unblocks it

The order of the ranks rotates from round to round, so that none is always read last. A pause is as
long as its round took, up to LONGEST_PAUSE_S, which only a busy machine reaches.
"""

import linecache
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hangdoctor.collect import pyspy
from hangdoctor.collect.discover import Search, Target, find_job
from hangdoctor.collect.process import ProcState, connected_ports, proc_state, process_table
from hangdoctor.errors import UnreadableDump
from hangdoctor.parse.stacks_json import parse_stacks_json
from hangdoctor.slow.engines import Engine, find_engines, look_at
from hangdoctor.slow.phases import Activity, activity_of

SECONDS = 15.0
PAUSE_S = 0.15
TIMEOUT_S = 5.0
LONGEST_PAUSE_S = 0.3
ENOUGH_ROUNDS, STRETCH = 30, 1.5
PARALLEL = 4 * (os.cpu_count() or 1)
COLLECTORS = ("gc_collect", "collect_generations", "deduce_unreachable", "_Py_RunGC")


@dataclass(frozen=True, slots=True)
class Track:
    """One process over all rounds: what it did in each, None where it could not be read.

    `cpu_wait` is the share of the time in which its main thread was runnable without a CPU;
    `problem` is why it could not be read.
    """

    name: str
    rank: int | None
    pid: int
    activities: tuple[Activity | None, ...]
    cpu_wait: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """All that was seen of a job: its ranks, the servers that they wait for, and for how long.

    `elsewhere` are ranks on other hosts.
    """

    tracks: tuple[Track, ...]
    engines: tuple[Engine, ...]
    num_rounds: int
    seconds: float
    elsewhere: tuple[int, ...] = ()


@dataclass(slots=True)
class Seen:
    """What the rounds have seen of one process so far.

    `ports` are those on this host that it was connected to in the last round, in a rollout.
    """

    target: Target
    activities: list[Activity | None] = field(default_factory=list)
    ports: frozenset[int] = frozenset()
    states: list[tuple[float, ProcState]] = field(default_factory=list)
    problem: str = ""


def observe(search: Search, seconds: float = SECONDS) -> Observation:
    """Sample the job that `search` finds on this host for some seconds.

    Raises:
        HangInputError: no py-spy, no rank, or more than one job (subclasses in `errors`).
    """
    tool = pyspy.find_pyspy()
    job = find_job(search, process_table())
    seen = [Seen(target) for target in job.targets if target.role == "trainer"]
    known = [target.pid for target in job.targets if target.role != "engine"]
    engines = find_engines([target.pid for target in job.targets if target.role == "engine"], (), ())
    looked_up: set[int] = set()
    started, num_rounds = time.monotonic(), 0
    with ThreadPoolExecutor(PARALLEL) as pool:
        while is_on(time.monotonic() - started, num_rounds, seconds):
            begin, turn = time.monotonic(), num_rounds % max(len(seen), 1)
            list(pool.map(partial(look, tool=tool), seen[turn:] + seen[:turn]))
            if new := {port for one in seen for port in one.ports} - looked_up:
                looked_up |= new
                pids = {pid for engine in engines for pid in engine.pids}
                engines += find_engines((), new, [*known, *pids])
            for engine in engines:
                engine.clients |= {one.target.name for one in seen if one.ports & engine.ports}
            list(pool.map(partial(look_at, tool=tool, round_number=num_rounds, timeout_s=TIMEOUT_S), engines))
            num_rounds += 1
            time.sleep(min(max(PAUSE_S, time.monotonic() - begin), LONGEST_PAUSE_S))
    tracks = tuple(track_of(one) for one in seen)
    return Observation(tracks, tuple(engines), num_rounds, time.monotonic() - started, job.elsewhere)


def is_on(elapsed_s: float, num_rounds: int, seconds: float) -> bool:
    """True until the time is over; on a busy machine, with few rounds until then, some more."""
    return elapsed_s < seconds * (1.0 if num_rounds >= ENOUGH_ROUNDS else STRETCH)


def look(seen: Seen, tool: str) -> None:
    """Add what one process does now."""
    pid = seen.target.pid
    proc = proc_state(pid)
    done = pyspy.dump_once(tool, pid, TIMEOUT_S)
    activity = None
    if proc is not None and done.status == "dumped":
        try:
            _, threads = parse_stacks_json(done.output)
            before = seen.states[-1][1].major_faults if seen.states else proc.major_faults
            activity = activity_of(threads, proc, proc.major_faults - before, source_line)
        except UnreadableDump as error:
            seen.problem = str(error)
    else:
        seen.problem = done.detail
    if proc is not None:
        seen.states.append((time.monotonic(), proc))
    seen.activities.append(activity)
    requests = activity is not None and activity.phase == "rollout"
    seen.ports = connected_ports(pid) if requests else frozenset()


def source_line(file: str, line: int) -> str:
    return linecache.getline(file, line) if line and Path(file).is_absolute() else ""


def track_of(seen: Seen) -> Track:
    cpu_wait = 0.0
    if len(seen.states) > 1:
        (start, first), (end, last) = seen.states[0], seen.states[-1]
        cpu_wait = (last.cpu_wait_s - first.cpu_wait_s) / (end - start)
    return Track(
        seen.target.name, seen.target.rank, seen.target.pid, tuple(seen.activities), cpu_wait, seen.problem
    )


def collects_garbage(pid: int, tool: str) -> bool:
    """True if the native stack of a process shows Python's garbage collector.

    Python frames do not show it. Reading native frames pauses the process for about 50 ms.
    """
    done = pyspy.dump(tool, pid, TIMEOUT_S, native=True)
    return any(line.strip().startswith(COLLECTORS) for line in done.output.splitlines())
