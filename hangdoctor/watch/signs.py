"""Signs of life of a process at one moment, read without touching it: beat, log, GPU power, CPU
time.

A beat is proof of progress; a growing log nearly so. GPU power that varies is a sign of work,
utilisation is not: a kernel that waits in NCCL shows 100 %. CPU time counts on hosts without GPUs
only, for the same reason.
"""

import os
from dataclasses import dataclass
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
    return found + [_beating(beat) for name, beat in beats.items() if name not in known]


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


def _beating(beat: Beat) -> Signs:
    return Signs(beat.name, True, beat.step, beat.time, beat.done)


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
