"""Runs prompts through workflows: never more than allowed, as early as allowed, and consumed before they are too old.

    trainer thread                                  event loop thread (all state lives here, so there are no locks)
    -----------------------------------------       --------------------------------------------------------------
    submit(data, workflow) ---- prompt -----------> pending --+
    prepare_batch(feed, ...) -- feed -------------> feed -----+--> start_more: while capacity() > 0, a task a prompt
                                                                     |      its n_samples episodes --> engine, reward
    waits for accepted prompts <--- wakes --------  ready  <----- finished: accepted | rejected | failed
    wait, wait_for_task, rollout_batch <--- wakes   done   <-----    |
    set_version, resume ------------------------->  start_more       +--> start_more (a rejection makes room)

Nothing polls: each event that can make room calls `start_more`, each that can satisfy a waiter wakes it. So between two batches,
while the trainer trains, the pipe stays full, and a new version starts what the old one did not allow.

A waiter is never left in silence. What cannot come (`RolloutStuck`), what always fails (the workflow's own exception) and what is
always rejected (`NothingAccepted`) is raised; what only takes long is told by name, and again each time the wait has doubled (`watch.py`).
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from areal_core.batch import Batch
from areal_core.rollout.engine import InferenceEngine
from areal_core.rollout.episode import EpisodeEngine, assemble, oldest_version, run_episodes
from areal_core.rollout.errors import NothingAccepted, RolloutStuck
from areal_core.rollout.loop_thread import LoopThread
from areal_core.rollout.staleness import StalenessControl, choose_batch
from areal_core.rollout.watch import Patience, Watch
from areal_core.rollout.workflow import RolloutWorkflow

logger = logging.getLogger(__name__)
T = TypeVar("T")
Row = dict[str, Any]
AcceptFn = Callable[[Batch], bool]  # all rows of one prompt -> whether the trainer shall see them

MAX_REJECTED_BATCHES = 4  # rejected prompts in a row, in batches, before a filter is called hopeless
MIN_REJECTED = 32


class Feed(Protocol):
    """Where `prepare_batch` takes prompts from; called on the event loop thread."""

    def take(self) -> tuple[int, Row]:
        """The next `(prompt_id, row)`, for ever."""
        ...


@dataclass(frozen=True)
class Plan:
    """What is done with a prompt: `n_samples` episodes of a workflow; all of them are dropped unless `should_accept`."""

    workflow: RolloutWorkflow
    n_samples: int = 1
    should_accept: AcceptFn | None = None


@dataclass(eq=False)
class Group:
    """One prompt on its way."""

    task_id: int
    prompt_id: int
    data: Row
    plan: Plan
    from_feed: bool = False
    version: int = -1  # at the start; once finished, that of the oldest token
    task: asyncio.Task[None] | None = None
    episodes: list[EpisodeEngine] = field(default_factory=list)
    rows: list[Batch | None] | None = None  # per episode; None unless accepted

    def batch(self) -> Batch | None:
        """The accepted rows in canonical order."""
        return None if self.rows is None else assemble([(self.prompt_id, self.rows)])


class Executor:
    """The rollouts of one data-parallel rank. Its methods are called from any thread but its own.

    Args:
        engine: samples tokens.
        control: the limits, and the counts of what happened.
        loop: the thread to share with another executor; by default one of its own.
        max_failures: prompts per batch whose episodes may raise; one more raises the episode's own exception.
        check_format: check shapes, dtypes and masks of what workflows return.
        patience: when a wait is called long.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        control: StalenessControl,
        *,
        loop: LoopThread | None = None,
        max_failures: int = 0,
        check_format: bool = False,
        patience: Patience | None = None,
    ) -> None:
        self.engine = engine
        self.control = control
        self.loop = loop or LoopThread()
        self.max_failures = max_failures
        self.check_format = check_format
        self._owns_loop = loop is None
        self._patience = patience or Patience()
        self._task_ids = itertools.count()
        self._pending: deque[Group] = deque()
        self._running: dict[int, Group] = {}
        self._ready: list[Group] = []  # accepted, from the feed, not yet consumed
        self._done: dict[int, Group] = {}  # finished, submitted one by one, not yet fetched
        self._feed: tuple[Feed, Plan] | None = None
        self._is_paused = False
        self._failures = self._rejections = 0  # failures since the last batch, rejections in a row
        self._error: Exception | None = None
        self._waiters: list[asyncio.Future[None]] = []

    # --- called by the trainer's thread

    def submit(
        self,
        data: Row,
        workflow: RolloutWorkflow,
        *,
        prompt_id: int | None = None,
        n_samples: int = 1,
        should_accept: AcceptFn | None = None,
    ) -> int:
        """Queues a prompt and returns its task id at once; it starts when the limits allow."""
        return self.loop.run(self._submit(prompt_id, data, Plan(workflow, n_samples, should_accept)))

    def wait(self, count: int, timeout_s: float | None = None) -> list[Batch | None]:
        """The rows of `count` submitted prompts that have finished, oldest first; None for one that was rejected or failed.

        Raises:
            TimeoutError, RolloutStuck, and the first exception of an episode beyond `max_failures`.
        """
        return [group.batch() for group in self.loop.run(self._wait(count, timeout_s))]

    def wait_for_task(self, task_id: int, timeout_s: float | None = None) -> Batch | None:
        """The rows of one submitted prompt; None if it was rejected or failed. Raises as `wait` does."""
        return self.loop.run(self._wait_for_task(task_id, timeout_s)).batch()

    def rollout_batch(
        self,
        prompts: Sequence[tuple[int, Row]],
        workflow: RolloutWorkflow,
        *,
        n_samples: int = 1,
        should_accept: AcceptFn | None = None,
        timeout_s: float | None = None,
    ) -> Batch:
        """Runs these `(prompt_id, row)` and waits for all of them; the accepted rows in canonical order.

        Raises:
            NothingAccepted: not one was accepted; and as `wait` does.
        """
        plan = Plan(workflow, n_samples, should_accept)
        groups = self.loop.run(self._run_all(prompts, plan, timeout_s))
        accepted = [(group.prompt_id, group.rows) for group in groups if group.rows is not None]
        if not accepted:
            raise NothingAccepted(f"all {len(groups)} prompts were rejected or failed; look at their rewards")
        return assemble(accepted)

    def prepare_batch(
        self,
        feed: Feed,
        workflow: RolloutWorkflow,
        *,
        n_samples: int = 1,
        should_accept: AcceptFn | None = None,
        timeout_s: float | None = None,
    ) -> Batch:
        """`control.batch_size` accepted prompts for the current version, in canonical order; goes on sampling the next ones.

        Raises:
            NothingAccepted: prompt after prompt was rejected; and as `wait` does.
        """
        plan = Plan(workflow, n_samples, should_accept)
        groups = self.loop.run(self._prepare(feed, plan, timeout_s))
        return assemble([(group.prompt_id, group.rows or []) for group in groups])

    def set_version(self, version: int) -> None:
        """Tells the version of the trainer's weights, and starts what it allows."""
        self.loop.run(self._change(lambda: setattr(self.control, "version", version)))

    def continue_at(self, version: int) -> None:
        """Goes on in a run that has consumed a batch for each version before this one."""
        self.loop.run(self._change(lambda: self.control.continue_at(version)))

    def pause(self) -> None:
        """Starts no new prompt; those that run go on."""
        self.loop.run(self._change(lambda: setattr(self, "_is_paused", True)))

    def resume(self) -> None:
        self.loop.run(self._change(lambda: setattr(self, "_is_paused", False)))

    def snapshot(self, read: Callable[[list[int]], T]) -> T:
        """`read(prompt_ids)` of what the feed gave and no batch has taken yet, at one moment between two events."""
        return self.loop.run(self._snapshot(read))

    def close(self) -> None:
        """Cancels what runs. The engine stays open."""
        self.loop.run(self._cancel_running())
        if self._owns_loop:
            self.loop.close()

    # --- on the event loop's thread

    async def _submit(self, prompt_id: int | None, data: Row, plan: Plan) -> int:
        task_id = next(self._task_ids)
        self._pending.append(Group(task_id, task_id if prompt_id is None else prompt_id, data, plan))
        self._start_more()
        return task_id

    async def _run_all(
        self, prompts: Sequence[tuple[int, Row]], plan: Plan, timeout_s: float | None
    ) -> list[Group]:
        ids = [await self._submit(prompt_id, data, plan) for prompt_id, data in prompts]
        await self._until(lambda: all(i in self._done for i in ids) or None, f"{len(ids)} prompts", timeout_s)
        return [self._done.pop(task_id) for task_id in ids]

    async def _wait(self, count: int, timeout_s: float | None) -> list[Group]:
        if count > (known := len(self._pending) + len(self._running) + len(self._done)):
            raise RolloutStuck(
                f"wait({count}) would never return: {known} prompts were submitted and not fetched"
            )
        await self._until(lambda: len(self._done) >= count or None, f"{count} results", timeout_s)
        return [self._done.pop(task_id) for task_id in sorted(self._done)[:count]]

    async def _wait_for_task(self, task_id: int, timeout_s: float | None) -> Group:
        on_the_way = {group.task_id for group in self._pending} | self._running.keys() | self._done.keys()
        if task_id not in on_the_way:
            raise RolloutStuck(f"there is no task {task_id}, or its result was fetched before")
        await self._until(lambda: task_id in self._done or None, f"task {task_id}", timeout_s)
        return self._done.pop(task_id)

    async def _prepare(self, feed: Feed, plan: Plan, timeout_s: float | None) -> list[Group]:
        self._feed = (feed, plan)
        self._start_more()
        return await self._until(self._take_batch, f"{self.control.batch_size} prompts", timeout_s)

    async def _change(self, change: Callable[[], None]) -> None:
        change()
        self._start_more()
        self._wake()

    async def _snapshot(self, read: Callable[[list[int]], T]) -> T:
        groups = [*self._ready, *(group for group in self._running.values() if group.from_feed)]
        return read(sorted(group.prompt_id for group in groups))

    def _start_more(self) -> None:
        """Starts what may start. Called after everything that can make room."""
        try:
            while not self._is_paused and self._error is None and self.control.capacity() > 0:
                group = self._next_group()
                if group is None:
                    return
                self._start(group)
        except Exception as error:  # of the feed: a dataset that cannot be read. The waiter raises it
            self._error = error
            self._wake()

    def _next_group(self) -> Group | None:
        if self._pending:
            return self._pending.popleft()
        if self._feed is None:
            return None
        feed, plan = self._feed
        return Group(next(self._task_ids), *feed.take(), plan, from_feed=True)

    def _start(self, group: Group) -> None:
        group.version = self.control.version
        group.episodes = [EpisodeEngine(self.engine, group.prompt_id, i) for i in range(group.plan.n_samples)]
        self.control.running += 1
        self._running[group.task_id] = group
        group.task = asyncio.create_task(self._run(group))

    async def _run(self, group: Group) -> None:
        control, plan = self.control, group.plan
        try:
            rows = await run_episodes(group.episodes, plan.workflow, group.data, self.check_format)
            accepted = any(part is not None for part in rows) and is_accepted(group.prompt_id, rows, plan)
            group.version = oldest_version(rows, otherwise=group.version)
        except Exception as error:
            control.failed += 1
            self._fail(group, error)
        else:
            control.accepted += accepted
            control.rejected += not accepted
            self._rejections = 0 if accepted else self._rejections + 1
            group.rows = rows if accepted else None
        finally:
            del self._running[group.task_id]
            control.running -= 1
        if not group.from_feed:
            self._done[group.task_id] = group
        elif group.rows is not None:
            self._ready.append(group)
        self._start_more()
        self._wake()

    def _fail(self, group: Group, error: Exception) -> None:
        self._failures += 1
        if self._failures > self.max_failures:
            self._error = self._error or error
            return
        logger.warning(
            "prompt %d failed (%d of at most %d per batch): %s: %s",
            *(group.prompt_id, self._failures, self.max_failures, type(error).__name__, error),
        )

    def _take_batch(self) -> list[Group] | None:
        """The prompts of the next batch, once they are there."""
        control = self.control
        self._drop_stale()
        self._ready.sort(key=lambda group: group.task_id)
        chosen = choose_batch(
            [group.version for group in self._ready],
            [group.version for group in self._running.values() if group.from_feed],
            control.version,
            control.max_head_offpolicyness,
            control.batch_size,
        )
        if chosen is None:
            self._refuse_hopeless_filter()
            return None
        taken = set(chosen)
        groups = [self._ready[i] for i in chosen]
        self._ready = [group for i, group in enumerate(self._ready) if i not in taken]
        return groups

    def _drop_stale(self) -> None:
        stale = [group for group in self._ready if self.control.is_too_old(group.version)]
        if not stale:
            return
        self._ready = [group for group in self._ready if not self.control.is_too_old(group.version)]
        self.control.drop_stale(len(stale))
        logger.warning(
            "%d prompts (the first is %d) were dropped: their oldest tokens are of version %d, the trainer is at %d and "
            "max_head_offpolicyness is %d; the version moved without a batch being taken, or a server missed a push",
            *(len(stale), stale[0].prompt_id, stale[0].version),
            *(self.control.version, self.control.max_head_offpolicyness),
        )
        self._start_more()

    def _refuse_hopeless_filter(self) -> None:
        if self._rejections >= max(MIN_REJECTED, MAX_REJECTED_BATCHES * self.control.batch_size):
            raise NothingAccepted(
                f"{self._rejections} prompts in a row were rejected at version {self.control.version}: let the workflow or "
                f"should_accept_fn accept more, or look at the rewards of these prompts"
            )

    async def _until(self, ready: Callable[[], T | None], wanted: str, timeout_s: float | None) -> T:
        """What `ready` gives once it is not None; it is asked again after every event."""
        loop = asyncio.get_running_loop()
        end = None if timeout_s is None else loop.time() + timeout_s
        watch = Watch(self._patience, wanted)
        while True:
            if self._error is not None:
                error, self._error = self._error, None
                await self._cancel_running()
                raise error
            if (value := ready()) is not None:
                self._failures = 0
                return value
            if end is not None and loop.time() >= end:
                raise TimeoutError(f"{wanted} were not there within {timeout_s} s: {self._counts()}")
            woken = loop.create_future()
            self._waiters.append(woken)
            left = self._patience.look_every_s if end is None else end - loop.time()
            await asyncio.wait([woken], timeout=min(left, self._patience.look_every_s))
            if not woken.done():
                self._look(watch)

    def _look(self, watch: Watch) -> None:
        """Nothing has happened for a while: raises if nothing ever will, and otherwise says what is waited for."""
        control = self.control
        if self._is_paused:
            watch.paused()
        if self._running:
            watch.look([episode for group in self._running.values() for episode in group.episodes])
        elif not self._is_paused and control.capacity() <= 0:
            raise RolloutStuck(
                f"{watch.wanted} are waited for and no prompt may start: at version {control.version} with "
                f"max_head_offpolicyness {control.max_head_offpolicyness} and batch_size {control.batch_size} "
                f"{control.staleness_limit()} prompts may be accepted or running, and {control.accepted} are; take the accepted "
                f"ones and set_version({control.version + 1}), or raise max_head_offpolicyness"
            )
        elif not self._is_paused:
            raise RolloutStuck(f"{watch.wanted} are waited for and no prompt is left: {self._counts()}")

    def _counts(self) -> str:
        c = self.control
        return (
            f"{len(self._running)} run, {len(self._pending)} wait to start, {len(self._ready) + len(self._done)} have "
            f"finished and are not fetched (so far {c.accepted} accepted, {c.rejected} rejected, {c.failed} failed)"
        )

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _cancel_running(self) -> None:
        tasks = [group.task for group in self._running.values() if group.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def is_accepted(prompt_id: int, rows: Sequence[Batch | None], plan: Plan) -> bool:
    """What `should_accept` says of a prompt's rows. Its exception gets a note that names the prompt."""
    if plan.should_accept is None:
        return True
    try:
        return bool(plan.should_accept(assemble([(prompt_id, rows)])))
    except Exception as error:
        error.add_note(f"in should_accept_fn for prompt {prompt_id}")
        raise
