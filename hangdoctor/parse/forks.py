"""Apply a function to many jobs in forks of this process, in the order of the jobs.

    fork 0: jobs 0, 2, 4 ... ─pipe─┐
    fork 1: jobs 1, 3, 5 ... ─pipe─┴─> results 0, 1, 2 ...

A fork waits while its pipe is full and ends when nobody reads from it. The end of a pipe before all
results are there means that its fork has died: this process then does the jobs of that fork.
"""

import os
import pickle
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import BinaryIO, TypeVar

MOST_FORKS = 8  # beyond, joining their results takes longer than making them

Job = TypeVar("Job")
Result = TypeVar("Result")


def num_forks() -> int:
    """Return how many forks use this machine's cores, or 1 where a fork is not safe."""
    if sys.platform != "linux" or len(os.listdir("/proc/self/task")) > 1:
        return 1  # a lock that another thread holds stays locked in a fork
    return min(len(os.sched_getaffinity(0)), MOST_FORKS)


def forked_map(function: Callable[[Job], Result], jobs: Sequence[Job], forks: int) -> Generator[Result]:
    """Yield the result of each job, which must be possible to pickle."""
    started = [start(function, jobs[first::forks]) for first in range(forks)]
    try:
        for number, job in enumerate(jobs):
            _, results = started[number % forks]
            try:
                result = pickle.load(results)
            except (EOFError, pickle.UnpicklingError):  # the fork has died, maybe amid a result
                result = function(job)
            yield result
    finally:
        for _, results in started:
            results.close()  # all of them, since a fork has copies of the pipes before its own
        for process, _ in started:
            with suppress(ChildProcessError):
                os.waitpid(process, 0)


def start(function: Callable[[Job], Result], jobs: Sequence[Job]) -> tuple[int, BinaryIO]:
    """Start a fork; return its id and the pipe of its results."""
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, os.fdopen(reading, "rb")
    try:
        os.close(reading)
        with os.fdopen(writing, "wb") as results:
            for job in jobs:
                pickle.dump(function(job), results, pickle.HIGHEST_PROTOCOL)
                results.flush()
    finally:
        os._exit(0)  # without the parent's exit functions; the parent meets an error itself
