"""One thread that does jobs in order while the run trains on, holding at most so many of them.

    training thread   put(job) ─> [ at most `depth` jobs, the one in work included ] ─> work(job)   writer thread
                      wait(timeout) <──────────── a job is done, or work raised ─────────────

`put` never waits: who wants to wait for room asks `wait` first, for a bounded time, so that ranks can tell each other in between. An error
of `work` ends the thread, empties the queue, and stays in `error` for the training thread to find.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Job = TypeVar("Job")


class Background(Generic[Job]):
    """Calls `work` on each job given, one after another, in a thread of its own. `depth` is at least 1."""

    def __init__(self, work: Callable[[Job], None], depth: int) -> None:
        assert depth >= 1
        self.work, self.depth = work, depth
        self.error: Exception | None = None
        self.jobs: deque[Job] = deque()
        self.changed = threading.Condition()
        self.closing = False
        # a daemon: a process that dies of something else must not wait for a disk
        self.thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self.thread.start()

    @property
    def has_room(self) -> bool:
        """Whether `put` may be called."""
        return len(self.jobs) < self.depth

    @property
    def idle(self) -> bool:
        """Every job given is done, or will never be."""
        return not self.jobs

    def put(self, job: Job) -> None:
        """Takes a job; nothing once an error has occurred."""
        with self.changed:
            assert self.has_room
            if self.error is None:
                self.jobs.append(job)
                self.changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Returns when a job is done or has failed, or after the time; at once when idle."""
        with self.changed:
            pending = len(self.jobs)
            self.changed.wait_for(lambda: len(self.jobs) < pending or self.idle, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Ends the thread once it has done every job, waiting for at most the time; whether it ended."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: bool(self.jobs) or self.closing)
                if not self.jobs:
                    return
                job = self.jobs[0]
            try:
                self.work(job)
            except Exception as error:
                self._fail(error)
                return
            with self.changed:
                self.jobs.popleft()
                self.changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self.changed:
            self.error = error
            self.jobs.clear()
            self.changed.notify_all()
