"""Rounds of stacks of a running job: nonblocking py-spy of every rank, /proc beside each.

    find_job ─> round 0 ─(pause)─> round 1 ... until the time is over
                  └ thread pool: each thread waits for one py-spy, and a time-out unblocks it

The order of the ranks rotates from round to round, so that none is always read last. A pause is as
long as its round took, up to LONGEST_PAUSE_S, which only a busy machine reaches.
"""

import linecache
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from hangdoctor.collect import pyspy
from hangdoctor.collect.discover import Search, Target, find_job
from hangdoctor.collect.process import ProcState, connected_ports, descendants, proc_state, process_table
from hangdoctor.errors import HangInputError, UnreadableDump
from hangdoctor.frames import main_thread
from hangdoctor.parse.stacks_json import parse_stacks_json
from hangdoctor.slow.blame import Budget, SlowVerdict, judge
from hangdoctor.slow.phases import WAITING, Activity, activity_of, place_of
from hangdoctor.slow.servers import Engine, find_engines, look_at

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
            if new := requested_ports(seen) - looked_up:
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


def requested_ports(seen: list[Seen]) -> set[int]:
    return {port for one in seen for port in one.ports}


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


LOOKS, LOOK_FOR_S = 8, 4.0
LOOK_EVERY_S = 0.17
WORKER_LOOKS, MAX_WORKERS = 4, 8
LEAST_BUSY = 0.5
LEAST_SHARE = 0.1
UNEXPLAINED = (
    "forward",
    "backward",
    "input",
    "optimizer",
    "reward",
    "evaluation",
    "other",
    "logging",
    "swap",
)
"""Phases that the collector may run in the middle of."""


def who_is_slow(search: Search, seconds: float = SECONDS) -> SlowVerdict:
    """Sample the job that `search` finds on this host, and return who is slow.

    Raises:
        HangInputError: no py-spy, no rank, or more than one job (subclasses in `errors`).
    """
    seen = observe(search, seconds)
    verdict = judge(seen, {})
    if suspects := collector_suspects(verdict):
        verdict = judge(seen, garbage_shares(suspects))
    return with_loader_workers(verdict) if verdict.cause == "input" and verdict.culprit_ranks else verdict


def with_loader_workers(verdict: SlowVerdict) -> SlowVerdict:
    """Return a verdict with the call that the processes below the slow rank are in: its loader's
    workers, where it has any.
    """
    pid = next(budget.pid for budget in verdict.ranks if budget.rank == verdict.culprit_ranks[0])
    tool, places = pyspy.find_pyspy(), Counter[str]()
    for _ in range(WORKER_LOOKS):
        for child in descendants([pid], process_table())[:MAX_WORKERS]:
            done = pyspy.dump_once(tool, child, TIMEOUT_S)
            with suppress(UnreadableDump):
                main = main_thread(parse_stacks_json(done.output)[1]) if done.status == "dumped" else None
                places[place_of(main.frames) if main else ""] += 1
        time.sleep(LOOK_EVERY_S)
    del places[""], places[verdict.place]  # a fork that waits for work shows the call that forked it
    if not places:
        return verdict
    place = places.most_common(1)[0][0]
    return replace(verdict, evidence=(f"its loader's worker is at {place}", *verdict.evidence))


def sentence_about(search: Search, seconds: float) -> str | None:
    """Return one sentence on who is slow, None where nothing is or the ranks cannot be compared."""
    try:
        job = find_job(search, process_table())
        if sum(target.role == "trainer" for target in job.targets) < 2:
            return None
        verdict = who_is_slow(search, seconds)
    except HangInputError:
        return None
    return None if verdict.label in ("no_rank_is_slow", "inconclusive") else verdict.summary


def collector_suspects(verdict: SlowVerdict) -> list[Budget]:
    """Return the ranks in which garbage collection, which Python stacks do not show, could be the
    cause: those accused of a phase that uses the CPU, or all where ranks wait and none is accused.
    """
    if verdict.label == "slow_rank":
        accused = [budget for budget in verdict.ranks if budget.rank in verdict.culprit_ranks][:1]
        return [budget for budget in accused if may_collect(budget)]
    waits = sum(budget.waiting for budget in verdict.ranks) / max(len(verdict.ranks), 1)
    if verdict.label in ("late_in_turn", "no_rank_is_slow") and waits >= LEAST_SHARE * 2:
        return [budget for budget in verdict.ranks if may_collect(budget)]
    return []


def may_collect(budget: Budget) -> bool:
    return any(
        budget.shares.get(phase, 0.0) >= LEAST_SHARE and budget.busy[phase] >= LEAST_BUSY
        for phase in UNEXPLAINED
        if phase in budget.busy and phase not in WAITING
    )


def garbage_shares(suspects: Sequence[Budget]) -> dict[int, float]:
    look = partial(collects_garbage, tool=pyspy.find_pyspy())
    counts, looks, started = [0] * len(suspects), 0, time.monotonic()
    with ThreadPoolExecutor(PARALLEL) as pool:
        while looks < LOOKS and time.monotonic() - started < LOOK_FOR_S:
            found = pool.map(look, [budget.pid for budget in suspects])
            counts = [count + hit for count, hit in zip(counts, found, strict=True)]
            looks += 1
            time.sleep(LOOK_EVERY_S)
    return {budget.rank: count / looks for budget, count in zip(suspects, counts, strict=True)}
