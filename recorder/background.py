"""Run jobs in order in one thread while training continues, with a bounded queue.

    training thread   put(job) ─> [ at most `depth` jobs, including the running one ] ─> work(job)   writer thread
                      wait(timeout) <──────────── a job is done, or work raised ─────────────

`put` never blocks: a caller that needs a free slot calls `wait` first, with a timeout, so that
ranks can exchange their states in between. An error of `work` ends the thread, empties the queue,
and is kept in `error` for the training thread.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Job = TypeVar("Job")


class Background(Generic[Job]):
    """Call `work` on each job, one after another, in a separate thread. `depth` is at least 1."""

    def __init__(self, work: Callable[[Job], None], depth: int) -> None:
        assert depth >= 1
        self.work, self.depth = work, depth
        self.error: Exception | None = None
        self.jobs: deque[Job] = deque()
        self.changed = threading.Condition()
        self.closing = False
        # a daemon: a process that fails elsewhere must not wait for the disk
        self.thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self.thread.start()

    @property
    def has_room(self) -> bool:
        """True if `put` may be called."""
        return len(self.jobs) < self.depth

    @property
    def idle(self) -> bool:
        """True if every job is done, or will never run because of an error."""
        return not self.jobs

    def put(self, job: Job) -> None:
        """Queue a job; does nothing after an error."""
        with self.changed:
            assert self.has_room
            if self.error is None:
                self.jobs.append(job)
                self.changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Wait until a job has finished or failed, at most `timeout_s`; return if idle."""
        with self.changed:
            pending = len(self.jobs)
            self.changed.wait_for(lambda: len(self.jobs) < pending or self.idle, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """End the thread after the last job, waiting at most `timeout_s`.

        Return whether it has ended.
        """
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
