"""Stand beside a job, look once in a while, and when it goes silent find out why before anything kills it.

job ──signs──> follow, judge ──quiet──> collect + diagnose ──moves──> slow: wait twice as long
 ^                                                        └─hung──> post-mortem, hook, notify | kill | restart
 └── waits for nothing of ours: the watcher only reads /proc and the heartbeat files
"""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hangdoctor.collect.discover import Job, Search, find_job
from hangdoctor.collect.host import collect_host
from hangdoctor.collect.process import descendants, process_table, read_stat
from hangdoctor.collect.sample import Options
from hangdoctor.errors import HangInputError
from hangdoctor.heartbeat import VARIABLE, read_beats
from hangdoctor.model import Diagnosis
from hangdoctor.watch.judge import Judgement, Limits, Track, finished_without_steps, follow, judge
from hangdoctor.watch.signs import gpu_watts, read_signs

Then = Literal["notify", "kill", "restart"]
RESCAN_S = 15.0
GRACE_S = 10.0
HOOK_TIMEOUT_S = 60.0
PR_SET_CHILD_SUBREAPER = 36
STUCK = 1
"""Exit status of a watch that found a hang or a run without a step."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How to watch and what to do. `folder` receives one post-mortem folder a finding; `hook` is a shell command."""

    folder: Path
    limits: Limits = field(default_factory=Limits)
    poll_s: float = 2.0
    then: Then = "notify"
    hook: str = ""
    max_restarts: int = 3
    options: Options = field(default_factory=lambda: Options(num_samples=3, interval_s=5.0))


@dataclass(frozen=True, slots=True)
class Finding:
    """A hang that was found: the diagnosis, the folder of its post-mortem, and when (monotonic seconds)."""

    diagnosis: Diagnosis
    folder: Path
    found_at: float


Diagnose = Callable[[Path], Diagnosis]
"""Reads a collection, writes its reports beside it, gives the diagnosis."""
Tell = Callable[[str], None]


def watch_command(command: list[str], plan: Plan, diagnose: Diagnose, tell: Tell) -> int:
    """Run `command` as a child (so that the kernel lets us read it) and watch it until it ends.

    Returns the exit status of the command, or 1 when it hung and was killed or finished without a step.
    """
    _adopt_orphans()
    for attempt in range(plan.max_restarts + 1):
        beats = plan.folder / f"beats-{attempt}"
        beats.mkdir(parents=True)
        child = subprocess.Popen(command, env=os.environ | {VARIABLE: str(beats)})
        with _signals_forwarded_to(child):
            finding, tracks = _watch((child.pid,), beats, plan, diagnose, tell, child.poll)
            status = child.wait()
        if finding is not None and plan.then != "notify":
            if plan.then == "restart" and attempt < plan.max_restarts:
                tell(f"restarting, {plan.max_restarts - attempt} more times at most")
                continue
            return STUCK
        if status == 0 and finished_without_steps(tracks):
            tell("the job finished with status 0 and not one step: is its data empty, or its step count 0?")
            return STUCK
        return status
    raise AssertionError("the last attempt returns")


def watch_pids(pids: tuple[int, ...], plan: Plan, diagnose: Diagnose, tell: Tell) -> int:
    """Watch processes that somebody else has started until they end; 1 when they hung and were killed.

    Their heartbeats are found by the variable in their environment.
    """

    def ended() -> int | None:
        return None if any(_lives(pid) for pid in pids) else 0

    finding, tracks = _watch(pids, _beats_of(pids), plan, diagnose, tell, ended)
    return STUCK if finding is not None or finished_without_steps(tracks) else 0


def _beats_of(pids: tuple[int, ...]) -> Path:
    """The heartbeat folder that these processes or those below them were started with; else one that is empty."""
    table = process_table()
    for pid in [*pids, *descendants(pids, table)]:
        environment = table[pid].environment if pid in table else None
        if environment and VARIABLE in environment:
            return Path(environment[VARIABLE])
    return Path(os.devnull)


def _watch(
    pids: tuple[int, ...],
    beats: Path,
    plan: Plan,
    diagnose: Diagnose,
    tell: Tell,
    ended: Callable[[], int | None],
) -> tuple[Finding | None, dict[str, Track]]:
    """Look until the job ends, or hangs and is ended as planned.

    A slow job doubles the patience until it moves again. A hang is told at once, but nothing is killed before the
    silence has lasted half a limit longer: a checkpoint on slow storage looks hung and ends.
    """
    tracks: dict[str, Track] = {}
    job, watts, scanned_at, patience, finding = Job((), (), None), None, -RESCAN_S, 1, None
    while ended() is None:
        now = time.monotonic()
        if now - scanned_at >= RESCAN_S or not job.targets:
            job, watts, scanned_at = _find(pids), gpu_watts(), now
        tracks = follow(tracks, read_signs(job, read_beats(beats), watts), now)
        judgement = judge(tracks, now, plan.limits)
        if judgement.silent_s < judgement.limit_s / 2:
            if finding is not None:
                tell("it moves again")
            patience, finding = 1, None
        elif finding is None and judgement.silent_s > judgement.limit_s * patience:
            finding = _examine(pids, judgement, plan, diagnose, tell)
            patience *= 2
        elif finding and plan.then != "notify" and now - finding.found_at > judgement.limit_s / 2:
            _end(pids)
            return finding, tracks
        time.sleep(plan.poll_s)
    return finding, follow(tracks, read_signs(job, read_beats(beats), watts), time.monotonic())


def _find(pids: tuple[int, ...]) -> Job:
    """The job as it is now; empty while its ranks have not come up."""
    try:
        return find_job(Search(pids), process_table())
    except HangInputError:
        return Job((), (), None)


def _examine(
    pids: tuple[int, ...], judgement: Judgement, plan: Plan, diagnose: Diagnose, tell: Tell
) -> Finding | None:
    """Collect and diagnose a silent job. None when its stacks move: slow, not stuck."""
    folder = plan.folder / time.strftime("hang-%Y%m%d-%H%M%S")
    quiet = f"{', '.join(judgement.names)} silent for {judgement.silent_s:.0f} s (limit {judgement.limit_s:.0f} s)"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        collect_host(Search(pids), folder, plan.options)
        diagnosis = diagnose(folder)
    except HangInputError as error:
        tell(f"{quiet}, but nothing could be collected: {error}")
        return None
    if diagnosis.label == "straggler_or_not_hung":
        tell(f"{quiet}, but it moves: {diagnosis.summary}")
        return None
    finding = Finding(diagnosis, folder, time.monotonic())
    others = "; others have ended" if judgement.state == "partly_done" else ""
    tell(f"{quiet}{others}: {diagnosis.label}: {diagnosis.summary} Post-mortem: {folder}")
    _run_hook(finding, plan, tell)
    return finding


def _run_hook(finding: Finding, plan: Plan, tell: Tell) -> None:
    """The user's command, with the finding in its environment."""
    if not plan.hook:
        return
    diagnosis = finding.diagnosis
    told = {
        "HANGDOCTOR_LABEL": diagnosis.label,
        "HANGDOCTOR_CONFIDENCE": diagnosis.confidence,
        "HANGDOCTOR_CULPRITS": " ".join(map(str, diagnosis.culprit_ranks)),
        "HANGDOCTOR_SUMMARY": diagnosis.summary,
        "HANGDOCTOR_FOLDER": str(finding.folder),
    }
    try:
        status = subprocess.run(
            plan.hook, shell=True, env=os.environ | told, timeout=HOOK_TIMEOUT_S, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        tell(f"the hook {plan.hook!r} did not end in {HOOK_TIMEOUT_S:g} s and was left")
        return
    if status:
        tell(f"the hook {plan.hook!r} ended with status {status}")


def _end(pids: tuple[int, ...]) -> None:
    """SIGTERM to the whole tree, SIGKILL to what is left of it: a rank in a collective hears no SIGTERM."""
    family = [*pids, *descendants(pids, process_table())]
    _signal(family, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(_lives(pid) for pid in family):
        time.sleep(0.1)
    _signal(family, signal.SIGKILL)


def _lives(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state not in "ZX"


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


@contextmanager
def _signals_forwarded_to(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """What a scheduler or Ctrl-C tells the watcher is meant for the job, whose end then ends the watcher."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [
        signal.signal(number, lambda received, _frame: child.send_signal(received)) for number in numbers
    ]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _adopt_orphans() -> None:
    """When a launcher dies, its ranks become ours instead of init's: still watched, still readable under Yama."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
