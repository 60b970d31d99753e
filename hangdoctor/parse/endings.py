"""How each rank of a dead job ended, and where it waited until then.

JobLog -> the last attempt that failed -> by rank: the traceback of its wait, its own error, a dump
       -> stacks (where it waited), endings (why it ended), statuses of ranks without a stack

A rank that timed out shows in its traceback where it waited. One with an error of its own shows
that in its first traceback, and in the next one where it waited after it.
"""

import re
from dataclasses import dataclass, field

from hangdoctor.model import Ending, Frame, How, Thread
from hangdoctor.parse.job_log import Attempt, Failure, JobLog
from hangdoctor.tables import message
from hangdoctor.waits import wait_of

INTERRUPTED = message("endings", "interrupted")
LOST_PEER = message("endings", "lost_peer")
TIMED_OUT = message("endings", "timed_out")
STORE, DRIVER = message("endings", "store"), message("endings", "driver")
# Of a rank that left no traceback.
KILLED_LINE, ALONE = message("endings", "killed_line"), message("endings", "alone")
# Signals by which a launcher ends the ranks that are left, and those of a process that was killed.
BY_LAUNCHER, KILLED = (-15, -2, 143), (-9, -11, -7, -4, 137, 139)
ABORTED = (-6, 134)


@dataclass(slots=True)
class Ended:
    """`recovered` says that a later attempt ran on, `complete` that no rank is unknown."""

    stacks: dict[int, tuple[Thread, ...]] = field(default_factory=dict)
    endings: dict[int, Ending] = field(default_factory=dict)
    world_size: int | None = None
    recovered: bool = False
    complete: bool = False
    stopped: str = ""


def endings_of(job: JobLog, world_size: int | None, timed_out: set[int]) -> Ended:
    """Return how the ranks ended; `timed_out` are ranks whose NCCL watchdog ended them."""
    attempts = [a for _, a in sorted(job.attempts.items()) if a.failures or a.stacks]
    # One that only fails to connect says nothing of its own.
    telling = [
        a
        for a in attempts
        if any(kind_of(f) != "lost_peer" for f in a.failures)
        or any("init" not in wait_of(thread.frames).phases for _, dump in a.stacks for thread in dump)
    ]
    attempt = (telling or attempts or [Attempt()])[-1]
    if timed_out:  # the driver of these ranks has a traceback, and no rank
        attempt.failures = [f for f in attempt.failures if f.rank is not None or not DRIVER.match(f.error)]
    failures, dumps = by_rank(job, attempt, world_size)
    for failure in job.reported:
        if failure.rank is not None and failure.rank not in failures and failure.rank not in dumps:
            failures[failure.rank] = [failure]
    found = Ended(recovered=attempt.later, stopped=job.stopped)
    for rank, printed in failures.items():
        how, frames, words = reading_of(printed)
        if frames and rank not in dumps:
            whole = frames[-1].function == "<module>"  # else the head of the log may be cut
            found.stacks[rank] = (Thread(frames, "MainThread" if whole else "traceback"),)
        if how:
            found.endings[rank] = Ending(rank, how, words)
    found.stacks |= dumps
    for rank in (timed_out | job.waited) - set(found.endings):
        found.endings[rank] = Ending(rank, "timed_out", "its watchdog timed out")
    for rank, lines in job.written.items():
        if rank not in found.endings and (words := next(filter(ALONE.search, lines[-20:]), "")):
            how = "lost_peer" if LOST_PEER.search(words) else "failed"
            found.endings[rank] = Ending(rank, "killed" if KILLED_LINE.search(words) else how, words)
    for rank, (code, words) in job.exits.items():
        if rank not in found.endings and (how := how_ended(code, words, rank == job.first, bool(timed_out))):
            by = "; aborted, as NCCL's watchdog does after a time-out" if code in ABORTED else ""
            found.endings[rank] = Ending(rank, how, words + by)
    for rank, words in job.named.items():
        known = found.endings.get(rank)
        if known is None or known.how == "ended":
            found.endings[rank] = Ending(rank, "ended", words, named=True)
    first = job.first
    if first is None and job.in_order:
        first = next((rank for rank in failures if rank in found.endings), None)
    if first in found.endings:
        known = found.endings[first]
        found.endings[first] = Ending(first, known.how, known.words, known.named, True)
    silent = set(job.written) - {*found.endings, *found.stacks, *job.exits}
    if len(silent) == 1 < len(found.endings) and {e.how for e in found.endings.values()} == {"lost_peer"}:
        rank = silent.pop()
        found.endings[rank] = Ending(
            rank, "ended", "all others lost a peer, and it left no error", named=True
        )
    ranks = {*found.endings, *found.stacks, *job.exits, *job.written}
    joined = job.joined[1] if job.joined else 0
    found.complete = job.complete or bool(world_size or joined)
    found.world_size = max([world_size or 0, joined, *(rank + 1 for rank in ranks)])
    return found


def reading_of(printed: list[Failure]) -> tuple[How | None, tuple[Frame, ...], str]:
    """Return how a rank ended, the frames of its wait (empty without one), and its exception, from
    its tracebacks in their order.
    """
    own = ""
    if printed[0].chained:  # what came before it was cut
        return kind_of(printed[0]) or "cut", (), printed[0].error
    for failure in printed:
        kind = kind_of(failure)
        if kind == "failed":
            own = own or failure.error
        elif kind is None or kind in ("timed_out", "lost_peer"):
            how: How | None = "cut" if not failure.error else kind
            return ("failed" if own else how), failure.frames, own or failure.error
    return ("failed" if own else None), (), own


def kind_of(failure: Failure) -> How | None:
    """Return why one traceback was printed; None for an interrupt, and for one that was cut."""
    if INTERRUPTED.search(failure.error) or not failure.error:
        return None
    waited = bool(failure.frames) and wait_of(failure.frames).waits_for_peers
    if waited or STORE.search(failure.error):
        if LOST_PEER.search(failure.error):
            return "lost_peer"
        if TIMED_OUT.search(failure.error):
            return "timed_out"
    return "failed"


def how_ended(code: int | None, words: str, first: bool, watched: bool) -> How | None:
    """Return how a rank ended by its exit code and the launcher's words; None if that explains
    nothing. A watchdog aborts its process.
    """
    if code in ABORTED:
        return "timed_out" if watched else "killed"
    if (code in KILLED and first) or re.search(r"kill|memory|segm|evicted|signal", words, re.I):
        return "killed"
    return "ended" if code in (*BY_LAUNCHER, *KILLED) else None


def by_rank(
    job: JobLog, attempt: Attempt, world_size: int | None
) -> tuple[dict[int, list[Failure]], dict[int, tuple[Thread, ...]]]:
    """Return tracebacks and the last dump of each rank; those without a rank go to the ranks of
    which the launcher says that they failed, and that they were ended.
    """
    failures: dict[int, list[Failure]] = {}
    dumps = {rank: threads for rank, threads in attempt.stacks if rank is not None}
    unnamed: list[list[Failure]] = []
    for failure in attempt.failures:
        if failure.rank is not None:
            failures.setdefault(failure.rank, []).append(failure)
        elif failure.chained and unnamed and not unnamed[-1][0].chained:
            unnamed[-1].append(failure)
        else:
            unnamed.append([failure])
    joined = job.joined[1] if job.joined else 0
    known = max(
        [world_size or 0, joined, *(rank + 1 for rank in (*job.exits, *failures, *job.named))], default=0
    )
    taken = {*failures, *dumps}
    free = [rank for rank in range(known) if rank not in taken and rank not in job.named]
    free.sort(key=lambda rank: job.exits.get(rank, (1, ""))[0] in BY_LAUNCHER)
    if not taken and not job.exits and not joined:
        free += range(known, known + max(0, len(unnamed) - len(free)))
    unnamed.sort(key=lambda printed: [kind_of(f) != "timed_out" for f in printed])
    for printed, rank in zip(unnamed, free, strict=False):
        failures[rank] = printed
    left = [rank for rank in range(known) if rank not in failures and rank not in dumps]
    left.sort(key=lambda rank: (rank not in job.named, job.exits.get(rank, (0, ""))[0] not in BY_LAUNCHER))
    loose = [threads for rank, threads in attempt.stacks if rank is None]
    if not known:
        left = list(range(len(loose)))
    if len(loose) == len(left) or (left and left[0] in job.named):
        dumps |= dict(zip(left, loose, strict=False))
    elif ended := [rank for rank in left if job.exits.get(rank, (0, ""))[0] in BY_LAUNCHER]:
        dumps |= dict(zip(ended, loose, strict=False)) if len(ended) <= len(loose) else {}
    return failures, dumps
