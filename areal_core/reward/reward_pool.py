"""Reward functions in worker processes: killed when stuck, replaced when dead.

    await pool(...)  ->  queue of threads, 1 per worker  ->  pipe  ->  worker process (areal_core.reward.reward_worker)
                         waits for: a reply, the end of the process, or the time-out
                         and then:  returns it, starts a new process, or kills the process

A worker is a new interpreter that imports the reward function and nothing of the trainer, so it has
no torch, no GPU memory and no fork of a threaded process.
"""

import asyncio
import json
import logging
import math
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from areal_core.data.rows import rows_to_json
from areal_core.errors import RewardError, RewardFailed
from areal_core.reward.functions import RewardFn, name_of_reward_fn
from areal_core.safety.interpreter import python_command

logger = logging.getLogger(__name__)
Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments and row
START_TIMEOUT_S = 120.0  # a reward function may import a large library


class RewardPool:
    """Worker processes of a reward function, as a reward function that is awaited.

    `await pool(prompt, completion, prompt_ids, completion_ids, **row)` returns a float. It raises
    RewardError with the row for an exception of the function, a result that is not a finite
    number, and a worker that died in each attempt.

    Args:
        reward_fn: the function, importable by name, or its import path.
        timeout_s: maximum seconds of a call; the wait for a worker does not count.
        num_workers: calls at once; by default one for two CPU cores.
        max_retries: further attempts of a call whose worker died; it is replaced.
        timeout_reward: of a call that times out; None: it raises RewardError.

    Raises:
        RewardError: `reward_fn` has no import path.
    """

    def __init__(
        self,
        reward_fn: str | RewardFn,
        timeout_s: float = 15.0,
        num_workers: int | None = None,
        max_retries: int = 3,
        timeout_reward: float | None = 0.0,
    ) -> None:
        self.name = name_of_reward_fn(reward_fn)
        self.timeout_s, self.max_retries, self.timeout_reward = timeout_s, max_retries, timeout_reward
        self.num_timeouts = 0
        self.closed = False
        num_workers = num_workers or max(1, (os.cpu_count() or 1) // 2)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_Worker(self.name, timeout_s) for _ in range(num_workers)]
        for worker in self._workers:
            self._idle.put(worker)

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any
    ) -> float:
        return await asyncio.wrap_future(self.submit(prompt, completions, prompt_ids, completion_ids, **row))

    def submit(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any
    ) -> "Future[float]":
        """Submit a call from code without an event loop."""
        return self._threads.submit(
            self._run, (prompt, completions, list(prompt_ids), list(completion_ids)), row
        )

    def submit_many(self, calls: Sequence[Call]) -> "Future[list[float | RewardError]]":
        """Submit calls that one worker answers in turn, in one message: arguments and row of each.

        Errors are returned.
        """
        return self._threads.submit(self._run_many, calls)

    def close(self) -> None:
        """End the workers, also busy ones; their calls raise RewardError."""
        self.closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.interrupt()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.kill()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, arguments: tuple[Any, ...], row: dict[str, Any]) -> float:
        (outcome,) = self._run_many([(arguments, row)])
        if isinstance(outcome, float):
            return outcome
        prompt, completion, *_ = arguments
        raise RewardFailed(
            f"{self.name} {outcome}\nprompt {prompt[:200]!r}\ncompletion {completion[:200]!r}\nrow {repr(row)[:500]}"
        )

    def _run_many(self, calls: Sequence[Call]) -> list[float | RewardError]:
        jobs, outcomes, num_deaths = [encoded(call) for call in calls], list[float | RewardError](), 0
        worker = self._idle.get()
        try:
            while len(outcomes) < len(jobs):
                refused = jobs[len(outcomes)]
                if isinstance(refused, RewardError):
                    outcomes.append(refused)
                    continue
                waiting = takewhile(lambda job: isinstance(job, str), jobs[len(outcomes) :])
                try:
                    for reply in worker.call([str(job) for job in waiting]):
                        outcomes.append(self._late(worker) if reply is None else outcome_of(reply))
                        num_deaths = 0
                except RewardError as error:  # it could not be imported
                    outcomes.append(error)
                except (EOFError, OSError):
                    worker.kill()
                    num_deaths += 1
                    if self.closed or num_deaths > self.max_retries:
                        how = f"killed its process {num_deaths} times"
                        outcomes.append(
                            RewardError("was running when its pool was closed" if self.closed else how)
                        )
                        num_deaths = 0
        finally:
            self._idle.put(worker)
        return outcomes

    def _late(self, worker: "_Worker") -> float | RewardError:
        worker.kill()
        self.num_timeouts += 1
        late = f"did not return within {self.timeout_s} s"
        if self.timeout_reward is None:
            return RewardError(late)
        logger.warning("%s %s; its reward is %s", self.name, late, self.timeout_reward)
        return self.timeout_reward


def encoded(call: Call) -> str | RewardError:
    try:
        return rows_to_json(call)
    except TypeError as error:
        return RewardError(str(error))


def outcome_of(reply: bytes) -> float | RewardError:
    """Return the number in a worker's reply (`reward_worker.answer`), or why there is none."""
    found = json.loads(reply)
    if found["error"]:
        return RewardError(f"raised {found['error']}\n{found['traceback'].rstrip()}")
    if found["value"] is None or not math.isfinite(found["value"]):
        return RewardError(f"returned {found['shown']}; expected a finite number")
    return float(found["value"])


class _Worker:
    """One worker process, started on first use."""

    def __init__(self, reward_name: str, timeout_s: float) -> None:
        self.reward_name, self.timeout_s = reward_name, timeout_s
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None

    def call(self, jobs: Sequence[str]) -> Iterator[bytes | None]:
        """Yield the reply to each job, the last one None on a time-out.

        Raises EOFError or OSError if the process died.
        """
        if self.process is None:
            self._start()
        connection = self.connection
        assert connection is not None
        connection.send_bytes(f"[{','.join(jobs)}]".encode())
        for _ in jobs:
            if not connection.poll(self.timeout_s):
                yield None
                return
            yield connection.recv_bytes()

    def interrupt(self) -> None:
        # Also of one that has ended: until it is waited for, its number is that of the group.
        if (process := self.process) is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process and wait for its end; the next call starts another."""
        self.interrupt()
        process, connection, self.process, self.connection = self.process, self.connection, None, None
        if process is not None and connection is not None:
            process.wait()
            connection.close()

    def _start(self) -> None:
        ours, theirs = Pipe()
        self.process = subprocess.Popen(
            python_command(
                *("-m", "areal_core.reward.reward_worker"),
                *(str(theirs.fileno()), self.reward_name, str(self.timeout_s)),
            ),
            pass_fds=[theirs.fileno()],
            # A separate session: Ctrl-C reaches only the trainer, and the function's own child
            # processes are killed with the worker.
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        theirs.close()
        self.connection = ours
        # The import of the function must not count as time of its first call.
        if not ours.poll(START_TIMEOUT_S):
            self.kill()
            raise RewardError(f"could not be imported within {START_TIMEOUT_S} s")
        ours.recv_bytes()
