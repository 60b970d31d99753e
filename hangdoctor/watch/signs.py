"""What a process shows of its life at one moment, read without touching it: its beat, its log, its CPU time, its GPU.

A beat is proof of progress; a growing log nearly so. CPU time is not: a rank that spins in NCCL burns a whole core and
stands still. So each sign is used only where the better one is absent.
"""

from dataclasses import dataclass
from pathlib import Path

from hangdoctor.collect.discover import Job, Target
from hangdoctor.collect.process import PROC, read_stat
from hangdoctor.heartbeat import Beat


@dataclass(frozen=True, slots=True)
class Signs:
    """One process at one moment. None where there is no such sign; `log_bytes` is what its log files hold."""

    name: str
    alive: bool
    step: int | None = None
    beat_time: float | None = None
    done: bool = False
    log_bytes: int | None = None
    cpu_s: float | None = None

    @property
    def proof(self) -> tuple[object, ...]:
        """What must change for the process to count as moving: the best sign that it has."""
        if self.beat_time is not None:
            return ("beat", self.step, self.beat_time)
        if self.log_bytes is not None:
            return ("log", self.log_bytes)
        return ("cpu", None if self.cpu_s is None else round(self.cpu_s))


def read_signs(job: Job, beats: dict[str, Beat]) -> list[Signs]:
    """The signs of every rank and server of a job, and of every process that beats without being one."""
    ranks = [target for target in job.targets if target.role not in ("child", "launcher")]
    found = [_signs_of(target, beats.get(target.name)) for target in ranks]
    known = {target.name for target in ranks}
    return found + [_beating(beat) for name, beat in beats.items() if name not in known]


def _signs_of(target: Target, beat: Beat | None) -> Signs:
    stat = read_stat(target.pid)
    alive = stat is not None and stat.state not in "ZX"
    if beat is not None:
        return Signs(target.name, alive, beat.step, beat.time, beat.done)
    return Signs(
        target.name, alive, log_bytes=_log_bytes(target.pid), cpu_s=stat.cpu_s if stat is not None else None
    )


def _beating(beat: Beat) -> Signs:
    return Signs(beat.name, True, beat.step, beat.time, beat.done)


def _log_bytes(pid: int) -> int | None:
    """The size of the regular files that it writes stdout and stderr to."""
    sizes = []
    for descriptor in ("1", "2"):
        link = Path(PROC, str(pid), "fd", descriptor)
        try:
            if link.is_file():
                sizes.append(link.stat().st_size)
        except OSError:
            continue
    return sum(sizes) if sizes else None
