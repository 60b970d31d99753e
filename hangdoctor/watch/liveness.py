"""Signs of life of each process, and what they say: slow or stuck, by signs and clock alone.

signs ──follow──> tracks (when did each process last move?) ──judge──> starting | moving | quiet |
partly_done
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from hangdoctor.collect.discover import Job, Target
from hangdoctor.collect.evidence import gpus
from hangdoctor.collect.process import PROC, read_stat
from hangdoctor.heartbeat import Beat


@dataclass(frozen=True, slots=True)
class Signs:
    """One process at one moment; None where there is no such sign.

    `log_bytes` is the size of its log files, `gpu_watts` the power of all GPUs of the host, `cpu_s`
    user plus system time.
    """

    name: str
    alive: bool
    step: int | None = None
    beat_time: float | None = None
    done: bool = False
    log_bytes: int | None = None
    gpu_watts: float | None = None
    cpu_s: float | None = None


def read_signs(job: Job, beats: dict[str, Beat], gpu_watts: float | None) -> list[Signs]:
    ranks = [target for target in job.targets if target.role not in ("child", "launcher")]
    known = {target.name for target in ranks}
    found = [_signs_of(target, beats.get(target.name), gpu_watts) for target in ranks]
    return found + [
        Signs(beat.name, True, beat.step, beat.time, beat.done)
        for name, beat in beats.items()
        if name not in known
    ]


def gpu_watts() -> float | None:
    """Return the power of all GPUs of this host in watts, or None where no driver reports it."""
    drawn = [card.power_watts for card in gpus() or [] if card.power_watts is not None]
    return sum(drawn) if drawn else None


def _signs_of(target: Target, beat: Beat | None, watts: float | None) -> Signs:
    stat = read_stat(target.pid)
    alive = stat is not None and stat.state not in "ZX"
    if beat is not None:
        return Signs(target.name, alive, beat.step, beat.time, beat.done)
    cpu_s = stat.cpu_s if stat is not None else None
    return Signs(target.name, alive, log_bytes=_log_bytes(target.pid), gpu_watts=watts, cpu_s=cpu_s)


def _log_bytes(pid: int) -> int | None:
    """Return the size of the regular files that it writes stdout and stderr to.

    Those that we write our reports to, as in `hang watch -- JOB >log 2>&1`, are left out: a report
    would be a sign of life.
    """
    sizes, ours = [], [os.fstat(descriptor) for descriptor in (1, 2)]
    for descriptor in ("1", "2"):
        link = Path(PROC, str(pid), "fd", descriptor)
        try:
            if link.is_file() and not any(os.path.samestat(link.stat(), own) for own in ours):
                sizes.append(link.stat().st_size)
        except OSError:
            continue
    return sum(sizes) if sizes else None


PAUSES_BEFORE_QUIET = 5
"""A process is quiet when its pause is this many times its longest earlier pause."""
LEAST_QUIET_S = 120.0
GPU_POWER_CHANGE = 0.1
"""The power of computing GPUs varies; that of GPUs in a collective is constant to 1-2 %."""
CPU_SHARE = 0.3
"""Of one core, between two polls. Loggers and progress bars of a hung rank use a few percent."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in seconds.

    `quiet_s` is the silence that is suspicious; None learns it from the job's own pauses.
    `watchdog_s` is when NCCL (or the scheduler) will kill the job: the collection comes at half of
    it.
    """

    quiet_s: float | None = None
    watchdog_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Track:
    """One process over time: its last signs and when they were seen, those when it last moved and
    when that was, and the longest pause between two moves.
    """

    signs: Signs
    seen_at: float
    anchor: Signs
    moved_at: float
    longest_pause_s: float = 0.0
    num_moves: int = 0


@dataclass(frozen=True, slots=True)
class Judgement:
    """`state` is starting, moving, quiet or partly_done; `names` are the processes it is about."""

    state: str
    names: tuple[str, ...]
    silent_s: float
    limit_s: float


def follow(tracks: dict[str, Track], seen: list[Signs], now: float) -> dict[str, Track]:
    """Return the tracks after one more poll. A process that is no longer seen has ended."""
    updated = {
        name: replace(track, signs=replace(track.signs, alive=False)) for name, track in tracks.items()
    }
    for signs in seen:
        before = tracks.get(signs.name)
        if before is None:
            updated[signs.name] = Track(signs, now, signs, now)
        elif not _has_moved(before, signs, now):
            updated[signs.name] = replace(before, signs=signs, seen_at=now)
        else:
            pause_s = max(before.longest_pause_s, now - before.moved_at if before.num_moves else 0.0)
            updated[signs.name] = Track(signs, now, signs, now, pause_s, before.num_moves + 1)
    return updated


def _has_moved(before: Track, signs: Signs, now: float) -> bool:
    """Return whether a process moved by the best sign there is: beat, log, GPU power, and CPU time
    where nothing better is.
    """
    if signs.beat_time is not None:
        return (signs.step, signs.beat_time) != (before.signs.step, before.signs.beat_time)
    if signs.log_bytes != before.signs.log_bytes:
        return True
    if signs.gpu_watts is not None:
        usual = before.anchor.gpu_watts or 0.0
        return abs(signs.gpu_watts - usual) > GPU_POWER_CHANGE * usual
    if signs.cpu_s is None or before.signs.cpu_s is None:
        return False
    return signs.cpu_s - before.signs.cpu_s > CPU_SHARE * (now - before.seen_at)


def judge_liveness(tracks: dict[str, Track], now: float, limits: Limits) -> Judgement:
    """Return the state of the job at `now`.

    Every process beats once a step, so one that stops is sufficient; logs and CPU time exist for
    some processes only, so without beats all of them must be silent.
    """
    ended = tuple(name for name, track in tracks.items() if _has_ended(track))
    working = {name: track for name, track in tracks.items() if not _has_ended(track)}
    limit_s = quiet_limit_s(tracks, limits)
    if not working:
        return Judgement("moving", (), 0.0, limit_s)
    beating = {name: track for name, track in working.items() if track.signs.beat_time is not None}
    silence = {name: now - track.moved_at for name, track in (beating or working).items()}
    silent_s = max(silence.values()) if beating else min(silence.values())
    if silent_s > limit_s:
        quiet = tuple(name for name, silent in silence.items() if silent > limit_s)
        return Judgement("partly_done" if ended else "quiet", quiet, silent_s, limit_s)
    return Judgement("moving" if _has_started(tracks) else "starting", (), silent_s, limit_s)


def quiet_limit_s(tracks: dict[str, Track], limits: Limits) -> float:
    """Return how long a silence may last, in seconds.

    `quiet_s` where it is given; else half the watchdog's time before the first step, which
    downloads and compiles, then a multiple of the longest pause between two beats so far, but in
    time before the watchdog.
    """
    if limits.quiet_s is not None:
        return limits.quiet_s
    if not _has_started(tracks):
        return limits.watchdog_s / 2
    beating = [track for track in tracks.values() if track.signs.beat_time is not None]
    pauses = [track.longest_pause_s for track in beating if track.num_moves > 1]
    learned = PAUSES_BEFORE_QUIET * max(pauses) if pauses else limits.watchdog_s
    return min(max(learned, LEAST_QUIET_S), limits.watchdog_s / 2)


def finished_without_steps(tracks: dict[str, Track]) -> bool:
    """True if processes with beats ended before any of them finished a step."""
    steps = [track.signs.step for track in tracks.values() if track.signs.step is not None]
    return bool(steps) and max(steps) == 0


def _has_started(tracks: dict[str, Track]) -> bool:
    return any(track.num_moves or track.signs.step for track in tracks.values())


def _has_ended(track: Track) -> bool:
    return track.signs.done or not track.signs.alive
