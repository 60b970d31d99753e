"""Watch a job, poll its signs of life, and when it goes silent find the cause before anything kills
it.

    job ──signs──> follow, judge ──quiet──> collect + diagnose ──moves──> slow: wait twice as long
     ^                                                        └─hung──> post-mortem, notify | kill
     └── waits for nothing of ours: the watcher only reads /proc and the heartbeat files
"""

import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from areal_core.safety.durable import sentence_of
from hangdoctor.collect.discover import NO_JOB, Job, Search, find_job, members
from hangdoctor.collect.host import collect_host
from hangdoctor.collect.process import descendants, process_table, read_stat
from hangdoctor.collect.pyspy import Options
from hangdoctor.collect.registered import read_registered, remove_dead, remove_empty
from hangdoctor.errors import HangInputError
from hangdoctor.heartbeat import VARIABLE, read_beats
from hangdoctor.model import Diagnosis
from hangdoctor.slow.live import sentence_about
from hangdoctor.slow.sample import SECONDS
from hangdoctor.watch.liveness import (
    Judgement,
    Limits,
    Track,
    finished_without_steps,
    follow,
    gpu_watts,
    judge_liveness,
    read_signs,
)

GRACE_S = 10.0
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37  # <sys/prctl.h>


def end_all(pids: list[int]) -> None:
    """Send SIGTERM to all, then SIGKILL to those that remain: a rank in a collective ignores
    SIGTERM.
    """
    signal_all(pids, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(lives(pid) for pid in pids):
        time.sleep(0.1)
    signal_all(pids, signal.SIGKILL)


def lives(pid: int) -> bool:
    """True if a process runs; one that has ended and waits for its parent does not."""
    stat = read_stat(pid)
    return stat is not None and stat.state not in "ZX"


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes; those that have ended are left out."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


@contextmanager
def signals_forwarded_to(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Forward signals to the job while it runs: its end then ends the watcher."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    previous = [
        signal.signal(number, lambda received, _frame: child.send_signal(received)) for number in numbers
    ]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


@contextmanager
def orphans_adopted() -> Iterator[None]:
    """Be the parent of ranks whose launcher dies, instead of init: still watched, still readable
    under Yama.

    This process is then what it was before: it does not collect the ended children of others.
    """
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


Then = Literal["notify", "kill"]
RESCAN_S = 15.0
STUCK = 1
"""Exit status of a watch that found a hang or a run without a step."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How to watch and what to do. `folder` receives one post-mortem folder per finding;
    `umask` is that of the job, by default our own; `slow_s` is how long a job that is silent and
    moves is sampled to find out which rank slows it down.
    """

    folder: Path
    limits: Limits = field(default_factory=Limits)
    poll_s: float = 2.0
    then: Then = "notify"
    umask: int = -1
    options: Options = field(default_factory=lambda: Options(num_samples=3, interval_s=5.0))
    slow_s: float = SECONDS


@dataclass(frozen=True, slots=True)
class WatchFinding:
    """A hang that was found: the diagnosis, its post-mortem folder, and the time (monotonic s)."""

    diagnosis: Diagnosis
    folder: Path
    found_at: float


@dataclass(frozen=True, slots=True)
class Watched:
    """The end of a watch: the hang that the job was in, its last tracks, whether we ended it."""

    finding: WatchFinding | None
    tracks: dict[str, Track]
    ended_by_us: bool


Diagnose = Callable[[Path], Diagnosis]
"""Reads a collection, writes its reports into the same folder, returns the diagnosis."""
Report = Callable[[str], None]


@orphans_adopted()
def watch_command(
    command: list[str],
    plan: Plan,
    diagnose: Diagnose,
    report: Report,
    waiting: Callable[[int], Callable[[float], object]] = lambda pid: time.sleep,
) -> int:
    """Run `command` as a child (so that the kernel lets us read it) and watch it until it ends.

    `waiting` gets the child's pid and returns what waits between two polls.

    Returns the exit status of the command, or 1 when it hung and was killed or finished without a
    step.
    """
    beats = plan.folder.resolve() / "beats"
    beats.mkdir(parents=True)
    child = subprocess.Popen(command, env=os.environ | {VARIABLE: str(beats)}, umask=plan.umask)
    with signals_forwarded_to(child):
        search = partial(Search, variable=(VARIABLE, str(beats)))
        watched = _watch(search, beats, plan, diagnose, report, child.poll, waiting(child.pid))
        status = child.wait()
        _end_orphans(search(), plan, report)
    if watched.ended_by_us:
        return STUCK
    if status == 0 and finished_without_steps(watched.tracks):
        report("the job finished with status 0 and without a step: is its data empty, or its step count 0?")
        return STUCK
    return status


def watch_pids(pids: tuple[int, ...], plan: Plan, diagnose: Diagnose, report: Report) -> int:
    """Watch processes that were started elsewhere until they end; return 1 when they hung at the
    end.

    Their heartbeats are found by the variable in their environment.
    """

    def ended() -> int | None:
        return None if any(lives(pid) for pid in pids) else 0

    watched = _watch(partial(Search, pids), _beats_of(pids), plan, diagnose, report, ended)
    return STUCK if watched.finding is not None or finished_without_steps(watched.tracks) else 0


def watch_registered(folder: Path, plan: Plan, diagnose: Diagnose, report: Report) -> None:
    """Watch the ranks that register in `folder`, whose lock we hold, until all have left or ended.

    The first that ends without leaving is reported: a launcher then ends the others.
    """
    is_first = True

    def search() -> Search:
        ranks = read_registered(folder)
        return Search(
            tuple(rank.pid for rank in ranks), declared={rank.pid: rank.environment for rank in ranks}
        )

    def ended() -> int | None:
        nonlocal is_first
        beats = read_beats(folder)
        dead = [
            f"{rank.name} (pid {rank.pid}, {beats[rank.name].step if rank.name in beats else 0} finished steps)"
            for rank in remove_dead(folder)
        ]
        if dead and is_first:
            report(f"killed or crashed: {', '.join(dead)}")
            is_first = False
        return 0 if remove_empty(folder) else None

    def wait(poll_s: float) -> None:
        """Wait until any of the ranks ends, for `poll_s` at most."""
        ends = select.poll()
        files = []
        for rank in read_registered(folder):
            with suppress(OSError):  # it has just ended
                files.append(os.pidfd_open(rank.pid))
                ends.register(files[-1], select.POLLIN)
        ends.poll(poll_s * 1000)
        for file in files:
            os.close(file)

    _watch(search, folder, plan, diagnose, report, ended, wait)
    while ended() is None:  # ended by us
        wait(plan.poll_s)


def _beats_of(pids: tuple[int, ...]) -> Path:
    """Return the heartbeat folder that these processes or their descendants were started with, else
    an empty one.
    """
    table = process_table()
    for pid in [*pids, *descendants(pids, table)]:
        environment = table[pid].environment if pid in table else None
        if environment and VARIABLE in environment:
            return Path(environment[VARIABLE])
    return Path(os.devnull)


def _end_orphans(search: Search, plan: Plan, report: Report) -> None:
    """Report ranks that outlive their launcher and hold its GPUs and ports; end them unless the
    plan is only to notify.
    """
    orphans = [pid for pid in members(search, process_table()) if lives(pid)]
    if orphans:
        fate = "" if plan.then == "notify" else "; ending them"
        report(f"{len(orphans)} processes outlived the job: pid {', '.join(map(str, orphans))}{fate}")
        if plan.then != "notify":
            end_all(orphans)


def _watch(
    search: Callable[[], Search],
    beats: Path,
    plan: Plan,
    diagnose: Diagnose,
    report: Report,
    ended: Callable[[], int | None],
    wait: Callable[[float], object] = time.sleep,
) -> Watched:
    """Poll until the job ends, or hangs and is ended as planned.

    A slow job doubles the patience until it moves again. A hang is reported at once, but nothing is
    killed before the silence has lasted half a limit longer: a checkpoint on slow storage
    appears hung and ends.
    """
    tracks: dict[str, Track] = {}
    job, watts, scanned_at, patience, finding = NO_JOB, None, -RESCAN_S, 1, None
    while ended() is None:
        now = time.monotonic()
        if now - scanned_at >= RESCAN_S or not job.targets:
            job, watts, scanned_at = _find(search()), gpu_watts(), now
        tracks = follow(tracks, read_signs(job, read_beats(beats), watts), now)
        judgement = judge_liveness(tracks, now, plan.limits)
        if judgement.silent_s < judgement.limit_s / 2:
            if finding is not None:
                report("it moves again")
            patience, finding = 1, None
        elif finding is None and judgement.silent_s > judgement.limit_s * patience:
            latest = _find(search())
            if _pids(latest) <= _pids(job):
                finding = _examine(search(), judgement, plan, diagnose, report)
                patience *= 2
            else:  # a process started after the last scan, and may not be silent
                job, scanned_at = latest, now
        elif finding and plan.then != "notify" and now - finding.found_at > judgement.limit_s / 2:
            end_all(members(search(), process_table()))
            return Watched(finding, tracks, ended_by_us=True)
        wait(plan.poll_s)
    last = follow(tracks, read_signs(job, read_beats(beats), watts), time.monotonic())
    return Watched(finding, last, ended_by_us=False)


def _find(search: Search) -> Job:
    """Return the job as it is now; empty while its ranks have not started."""
    try:
        return find_job(search, process_table())
    except HangInputError:
        return NO_JOB


def _pids(job: Job) -> set[int]:
    return {target.pid for target in job.targets}


def _examine(
    search: Search, judgement: Judgement, plan: Plan, diagnose: Diagnose, report: Report
) -> WatchFinding | None:
    """Collect and diagnose a silent job. Return None when its stacks move: slow, not stuck."""
    folder = plan.folder / time.strftime("hang-%Y%m%d-%H%M%S")
    quiet = f"{', '.join(judgement.names)} silent for {judgement.silent_s:.0f} s (limit {judgement.limit_s:.0f} s)"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        collect_host(search, folder, plan.options)
        diagnosis = diagnose(folder)
    except HangInputError as error:
        report(f"{quiet}, but nothing could be collected: {error}")
        return None
    except OSError as error:  # a full disk must not end the job that is watched
        report(f"{quiet}, but its collection cannot be written: {sentence_of(error)}")
        return None
    if diagnosis.label == "straggler_or_not_hung":
        report(f"{quiet}, but it moves: {sentence_about(search, plan.slow_s) or diagnosis.summary}")
        return None
    finding = WatchFinding(diagnosis, folder, time.monotonic())
    others = "; others have ended" if judgement.state == "partly_done" else ""
    report(f"{quiet}{others}: {diagnosis.label}: {diagnosis.summary} Post-mortem: {folder}")
    return finding
