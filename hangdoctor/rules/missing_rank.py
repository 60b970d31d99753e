"""An expected rank has no process that can be dumped, and the others wait for it.

What it looks like: seven dumps of eight; the seven wait in a collective or in the rendezvous. The
eighth was killed (out of memory, a node failure, the scheduler), was never started, is stopped by a
signal, or is in an uninterruptible system call.

Common causes: the kernel's out-of-memory killer (dmesg), a crash whose traceback is only in the log
of that rank, SIGSTOP from a debugger, a failed node that the launcher has not noticed, fewer
processes started than WORLD_SIZE.

A rank whose process nobody looked for is not missing: a collection, py-spy's own error, an exit
report, RAS or the count of the store's barrier has to prove it.

The ranks that wait are victims: their time-out names them, not the rank that is gone.
"""

import re

from hangdoctor.case import Case, ProcessState
from hangdoctor.frames import show
from hangdoctor.graph import Graph
from hangdoctor.groups import rank_ranges
from hangdoctor.model import Confidence, Evidence, NextStep, Rank
from hangdoctor.rules.verdict import LEVELS, Verdict, step, waiters_move, waiting_evidence, waiting_for

STORE_BARRIER = re.compile(
    r"Waiting in store based barrier.*world_size=(?P<world>\d{1,7}), worker_count=(?P<workers>\d{1,7})"
)
STATUS_TEXTS = {
    "gone": "has no process that could be dumped",
    "stopped": "is stopped (state T) and runs no instruction",
    "timed_out": "did not respond to the collector in time",
    "not_permitted": "could not be read: permission denied",
    "not_python": "runs no Python that can be read",
    "dumped": "returned no stack",
}


def judge(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict if the pattern is present, else None."""
    stopped = [s for s in case.ranks if s.status == "stopped" or s.thread_wait.kind == "stopped"]
    lost: dict[Rank, str] = dict(case.lost.items())
    lost |= {s.rank: "stopped" for s in stopped if s.rank is not None}
    waiters = [s for s in graph.waiting_ranks if s not in stopped]
    if not lost:
        return never_joined(case, graph)
    if not case.ranks or (not waiters and len(stopped) < len(case.ranks)):
        return None
    statuses = set(lost.values())
    return Verdict(
        "missing_rank",
        certainty(case, graph, lost, stopped),
        tuple(lost),
        f"{'Rank' if len(lost) == 1 else 'Ranks'} {rank_ranges(lost)} {STATUS_TEXTS[next(iter(lost.values()))]}; {waiting_for(graph)}.",
        loss_evidence(case, lost, stopped) + waiting_evidence(graph),
        next_steps(statuses),
        (
            "A process of that rank that is alive and computes: then this collection missed it.",
            "Stacks of the waiting ranks that change.",
        ),
    )


def never_joined(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict for a store barrier whose own count is lower than the world size: the rank
    that did not join it is not among the ranks that were read.
    """
    counts = [
        (int(m["world"]), int(m["workers"]), log.name)
        for log in case.snapshot.logs
        for line in log.lines
        if (m := STORE_BARRIER.search(line))
    ]
    if not counts or graph.sources or any(s.thread_wait.kind != "store" for s in case.ranks):
        return None
    world, workers, name = max(counts, key=lambda count: count[1])
    if workers >= world or len(case.ranks) > workers:
        return None
    return Verdict(
        "missing_rank",
        "medium" if case.ranks else "low",
        (),
        f"{world - workers} of {world} ranks never joined the store's barrier: {waiting_for(graph)}.",
        (Evidence("", f"its log: {workers} of {world} workers have joined", name), *waiting_evidence(graph)),
        (
            step(
                "pgrep -af NAME_OF_THE_SCRIPT",
                "on every node: how many ranks were started, and which rank is not there",
            ),
            step("nc -vz $MASTER_ADDR $MASTER_PORT", "on that rank's node: can it reach the store?"),
        ),
        ("A later line with the full count, or a rank that is alive and still imports or loads.",),
    )


def certainty(case: Case, graph: Graph, lost: dict[Rank, str], stopped: list[ProcessState]) -> Confidence:
    """Return high for a rank that is known to be gone or stopped, low for one that could not be
    read.
    """
    level = 2 if set(lost.values()) <= {"gone", "stopped"} else 0
    if case.num_samples < 2 or len(lost) > len(case.ranks):
        level = min(level, 1)
    if waiters_move(graph):
        level = 0
    if any(s.thread_wait.phases & {"cleanup", "error"} for s in graph.source_ranks if s not in stopped):
        level = min(level, 1)
    return LEVELS[level]


def loss_evidence(case: Case, lost: dict[Rank, str], stopped: list[ProcessState]) -> tuple[Evidence, ...]:
    found = [
        Evidence(str(rank), f"rank {rank} {STATUS_TEXTS[status]}", process=f"rank_{rank}")
        for rank, status in list(lost.items())[:8]
    ]
    for process_state in stopped[:4]:
        if process_state.thread_wait.frame:
            found.append(
                Evidence(
                    str(process_state.rank),
                    f"was stopped at {show(process_state.thread_wait.frame)}",
                    process_state.name,
                )
            )
    for error in case.snapshot.errors:
        if error.rank in lost:
            found.append(
                Evidence(
                    str(error.rank),
                    f"its error file: {error.message.splitlines()[0][:200]}"
                    if error.message
                    else "left an error file",
                )
            )
    for log in case.snapshot.logs:
        if log.rank in lost and log.lines:
            found.append(Evidence(str(log.rank), f"last line of its log: {log.lines[-1][:200]}"))
    return tuple(found)


def next_steps(statuses: set[str]) -> tuple[NextStep, ...]:
    """Return the next steps for the statuses of the lost ranks."""
    steps = []
    if "gone" in statuses:
        steps.append(
            step(
                "dmesg -T | grep -i -E 'killed process|oom'",
                "shows which process the kernel killed for memory",
            )
        )
        steps.append(step("tail -n 100 LOG_OF_THAT_RANK", "its last messages are in its own log only"))
    if "stopped" in statuses:
        steps.append(step("kill -CONT PID", "a stopped process continues where it was"))
    if "not_permitted" in statuses:
        steps.append(
            step(
                "sudo sysctl kernel.yama.ptrace_scope=0",
                "lets a user read the stacks of their own processes",
                "until reboot; weakens isolation between the user's processes",
            )
        )
    if "timed_out" in statuses:
        steps.append(
            step(
                "cat /proc/PID/stack /proc/PID/wchan",
                "a process in state D waits in the kernel, often for storage",
            )
        )
    return tuple(steps)
