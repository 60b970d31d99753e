"""The pipeline of prompts through workflows on one event loop.

At most as many prompts run as the limits allow, they start as early as possible, and they are
consumed within the allowed staleness.

    submit ---> pending --+
    prepare --> feed -----+--> start_more: while capacity() > 0, a task a prompt: its n_samples episodes --> engine, reward
                                   ^                     |
          set_version, resume, ----+        accepted | rejected | failed
          a result is fetched      |                     |
                                   +--- frees capacity --+--> ready (from the feed) | done (submitted)  --- wakes --> waiters

    waiter                 condition                             woken by
    a prompt               capacity() > 0, and no pause          a prompt that ends, a fetched result, set_version, resume
    wait, run_all          its prompts to end                    each prompt that ends
    prepare                batch_size prompts that may be        each prompt that ends, set_version
                           taken (`staleness.choose_batch`)
    an episode             the engine; its reward, its tools     the reply; the time limit of `RewardPool`
    a request              generation that is not paused         the end of a weight update, the engine's resume()

Nothing polls: each event that can free capacity calls `start_more`, each that can satisfy a waiter
wakes it. All state belongs to the event loop's thread, so there are no locks; other threads use
`executor.py`.

A waiter never waits silently. A wait that cannot end, and prompts that always fail or are rejected,
raise an exception (`tolerance.py`); a long wait is logged with the names of what it waits for, and
again each time it has doubled (`watch.py`).
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from areal_core.dataset.tokens import Row
from areal_core.rollout.engine import InferenceEngine
from areal_core.rollout.episode import EpisodeEngine, oldest_version, run_episodes
from areal_core.rollout.errors import RolloutStuck
from areal_core.rollout.feed import Feed
from areal_core.rollout.group import Group, Plan, is_accepted
from areal_core.rollout.staleness import StalenessControl, choose_batch
from areal_core.rollout.tolerance import Tolerance
from areal_core.rollout.watch import Patience, Watch

T = TypeVar("T")


class Pipeline:
    """The queued, running and finished prompts.

    Used on one event loop; arguments as of `Executor`.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        control: StalenessControl,
        max_failures: int = 0,
        check_format: bool = False,
        patience: Patience | None = None,
        holds_rejected: bool = False,
    ) -> None:
        self.engine = engine
        self.control = control
        self.check_format = check_format
        self.holds_rejected = holds_rejected
        self._is_paused = False
        self._patience = patience or Patience()
        self._tolerance = Tolerance(max_failures, control)
        self._task_ids = itertools.count()
        self._pending: deque[Group] = deque()
        self._running: dict[int, Group] = {}
        self._ready: list[Group] = []  # accepted or held, from the feed, not yet consumed
        self._done: dict[int, Group] = {}  # finished, from submit, not yet fetched
        self._feed: tuple[Feed, Plan] | None = None
        self._error: Exception | None = None
        self._waiters: list[asyncio.Future[None]] = []

    async def submit(self, prompt_id: int | None, data: Row, plan: Plan) -> int:
        """Queue a prompt and return its task id."""
        task_id = next(self._task_ids)
        self._pending.append(Group(task_id, task_id if prompt_id is None else prompt_id, data, plan))
        self._start_more()
        return task_id

    async def run_all(
        self, prompts: Sequence[tuple[int, Row]], plan: Plan, timeout_s: float | None
    ) -> list[Group]:
        """Submit these `(prompt_id, row)`, wait for all, and return them in order."""
        ids = [await self.submit(prompt_id, data, plan) for prompt_id, data in prompts]

        def all_done() -> bool | None:
            return (len(self._done) >= len(ids) and self._done.keys() >= set(ids)) or None

        await self._until(all_done, f"{len(ids)} prompts", timeout_s)
        return self._fetch(ids)

    async def wait(self, count: int, timeout_s: float | None) -> list[Group]:
        """Wait for `count` submitted prompts and return those that were submitted first."""
        if count > (known := len(self._pending) + len(self._running) + len(self._done)):
            raise RolloutStuck(
                f"wait({count}) would never return: {known} prompts were submitted and not fetched"
            )
        await self._until(lambda: len(self._done) >= count or None, f"{count} results", timeout_s)
        return self._fetch(sorted(self._done)[:count])

    async def wait_for_task(self, task_id: int, timeout_s: float | None) -> Group:
        """Wait for one submitted prompt."""
        known = {group.task_id for group in self._pending} | self._running.keys() | self._done.keys()
        if task_id not in known:
            raise RolloutStuck(f"there is no task {task_id}, or its result was fetched before")
        await self._until(lambda: task_id in self._done or None, f"task {task_id}", timeout_s)
        return self._fetch([task_id])[0]

    def _fetch(self, task_ids: Sequence[int]) -> list[Group]:
        groups = [self._done.pop(task_id) for task_id in task_ids]
        self.control.consumed += sum(group.rows is not None for group in groups)
        self._start_more()
        return groups

    async def prepare(self, feed: Feed, plan: Plan, timeout_s: float | None) -> list[Group]:
        """Wait for the next batch of the feed's prompts; later ones keep being started."""
        self._feed = (feed, plan)
        self._start_more()
        return await self._until(self._take_batch, f"{self.control.batch_size} prompts", timeout_s)

    async def set_version(self, version: int) -> None:
        """Set the trainer's version, and start the prompts that it allows."""
        self.control.version = version
        self._something_happened()

    async def continue_at(self, version: int) -> None:
        """Continue a run that has consumed a batch for each version before this one."""
        self.control.continue_at(version)
        self._something_happened()

    async def set_paused(self, is_paused: bool) -> None:
        """Stop or resume starting prompts; running ones continue."""
        self._is_paused = is_paused
        self._something_happened()

    async def snapshot(self, read: Callable[[list[int]], T]) -> T:
        """Return `read(prompt_ids)` of the feed's prompts that no batch has taken."""
        groups = [*self._ready, *(group for group in self._running.values() if group.from_feed)]
        return read(sorted(group.prompt_id for group in groups))

    def _something_happened(self) -> None:
        self._start_more()
        self._wake()

    def _start_more(self) -> None:
        """Start the prompts that may start. Called after every event that can free capacity."""
        try:
            while not self._is_paused and self._error is None and self.control.capacity() > 0:
                group = self._next_group()
                if group is None:
                    return
                self._start(group)
        except Exception as error:  # of the feed, such as an unreadable file; the waiter raises it
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
        control, plan, is_held = self.control, group.plan, False
        try:
            rows = await run_episodes(group.episodes, plan.workflow, group.data, self.check_format)
            accepted = any(episode is not None for episode in rows) and is_accepted(
                group.prompt_id, rows, plan
            )
            group.version = oldest_version(rows, otherwise=group.version)
        except Exception as error:
            control.failed += 1
            if self._tolerance.failed(group, error):
                self._error = self._error or error
        else:
            control.accepted += accepted
            control.rejected += not accepted
            is_held = self.holds_rejected and group.from_feed and not accepted
            control.held += is_held
            self._tolerance.judged(accepted)
            group.rows = rows if accepted else None
        finally:
            del self._running[group.task_id]
            control.running -= 1
        if not group.from_feed:
            self._done[group.task_id] = group
        elif group.rows is not None or is_held:
            self._ready.append(group)
        self._something_happened()

    def _take_batch(self) -> list[Group] | None:
        """Return the prompts of the next batch, or None if the trainer must wait."""
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
            self._tolerance.refuse_hopeless_filter()
            return None
        taken = set(chosen)
        groups = [self._ready[i] for i in chosen]
        self._ready = [group for i, group in enumerate(self._ready) if i not in taken]
        if all(group.rows is None for group in groups):  # no batch is possible: others replace them
            control.held -= len(groups)
            self._tolerance.refuse_hopeless_filter()
            self._start_more()
            return None
        control.consumed += len(groups)
        return groups

    def _drop_stale(self) -> None:
        stale = [group for group in self._ready if self.control.is_stale(group.version)]
        if stale:
            self._ready = [group for group in self._ready if not self.control.is_stale(group.version)]
            num_held = sum(group.rows is None for group in stale)
            self.control.held -= num_held
            self.control.drop_stale(len(stale) - num_held)
            self._tolerance.count_stale(stale)
            self._start_more()

    async def _until(self, ready: Callable[[], T | None], wanted: str, timeout_s: float | None) -> T:
        """Return the first value of `ready` that is not None; it is called after every event."""
        loop = asyncio.get_running_loop()
        end = None if timeout_s is None else loop.time() + timeout_s
        watch = Watch(self._patience, wanted)
        while True:
            if self._error is not None:
                error = self._error
                await self._cancel_running()
                self._error = None  # not before: until now it keeps others from starting
                raise error
            if (value := ready()) is not None:
                self._tolerance.batch_taken()
                return value
            if end is not None and loop.time() >= end:
                raise TimeoutError(f"{wanted} were not finished within {timeout_s} s: {self._counts()}")
            woken = loop.create_future()
            self._waiters.append(woken)
            left = self._patience.check_every_s if end is None else end - loop.time()
            await asyncio.wait([woken], timeout=min(left, self._patience.check_every_s))
            if not woken.done():
                self._check_wait(watch)

    def _check_wait(self, watch: Watch) -> None:
        """Raise `RolloutStuck` if the wait can never end; otherwise report what it waits for."""
        control = self.control
        if self._is_paused:
            watch.paused("the executor, which starts nothing,")
        if self.engine.is_paused:
            watch.paused("the engine, which samples nothing,")
        if self._running:
            watch.report_slow([episode for group in self._running.values() for episode in group.episodes])
        elif not self._is_paused and control.capacity() <= 0:
            raise RolloutStuck(
                f"{watch.wanted} are awaited and no prompt may start: at version {control.version} with "
                f"max_head_offpolicyness {control.max_head_offpolicyness} and batch_size {control.batch_size} "
                f"{control.staleness_limit()} prompts may be accepted or running, and {control.accepted} are; consume the "
                f"accepted ones and call set_version({control.version + 1}), or raise max_head_offpolicyness"
            )
        elif not self._is_paused:
            raise RolloutStuck(f"{watch.wanted} are awaited and no prompt is left: {self._counts()}")

    def _counts(self) -> str:
        c = self.control
        return (
            f"{len(self._running)} running, {len(self._pending)} queued, {len(self._ready) + len(self._done)} finished "
            f"and not fetched (so far {c.accepted} accepted, {c.rejected} rejected, {c.failed} failed)"
        )

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def close(self) -> None:
        """Cancel running prompts, and start no more."""
        self._is_paused = True
        await self._cancel_running()

    async def _cancel_running(self) -> None:
        tasks = [group.task for group in self._running.values() if group.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A task that was cancelled before its first step has not updated the count.
        self.control.running -= len(self._running)
        self._running.clear()
