"""The pipeline of prompts through workflows on one event loop.

At most as many prompts run as the limits allow, they start as early as possible, and they are
consumed within the allowed staleness.

trainer thread: `Executor`                   event loop thread: `Pipeline`
submit(data, workflow) --------------------> queues a prompt; starts it when the limits allow
prepare_batch(feed, ...)  <----------------- a batch that is ready, or the wait for one
... trains ...                               ... starts and finishes the prompts of the next batches ...
set_version(v) ----------------------------> starts what the previous version did not allow
pause, resume -----------------------------> stops, restarts new prompts; running ones continue

Inside the event loop thread:

    submit ---> pending --+
    prepare --> feed -----+--> _start_more: while capacity() > 0, a task a prompt: its n_samples
    episodes --> engine, reward
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

Nothing polls: each event that can free capacity calls `_start_more`, each that can satisfy a waiter
wakes it. All state belongs to the event loop's thread, so there are no locks.

A waiter never waits silently. A wait that cannot end, and prompts that always fail or are rejected,
raise an exception (`staleness.Tolerance`); a long wait is logged with the names of what it waits
for, and again each time it has doubled (`Watch`).
"""

import asyncio
import itertools
import logging
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from areal_core.data.batch import Batch
from areal_core.data.loader import PromptLoader
from areal_core.data.rows import Row
from areal_core.rollout.episodes import (
    AcceptFn,
    EpisodeEngine,
    Group,
    Plan,
    assemble,
    is_accepted,
    joined_scalars,
    oldest_version,
    run_episodes,
)
from areal_core.rollout.errors import NothingAccepted, RolloutStuck
from areal_core.rollout.loop_thread import LoopThread
from areal_core.rollout.staleness import StalenessControl, Tolerance, choose_batch
from areal_core.rollout.types import InferenceEngine
from areal_core.rollout.workflow import RolloutWorkflow
from areal_core.telemetry.in_episode import Scalars


@dataclass(frozen=True)
class Patience:
    """The durations after which a wait is reported.

    An episode without a request to the engine is in a reward, a tool or an agent's code. A reward
    process is killed after 15 s (`RewardPool`), so more than 20 s are unusual. A completion may
    take minutes.
    """

    check_every_s: float = 1.0
    paused_s: float = 5.0
    own_code_s: float = 20.0
    generation_s: float = 60.0


class Watch:
    """One wait for `wanted`, which starts now."""

    def __init__(self, patience: Patience, wanted: str) -> None:
        self.wanted = wanted
        self._patience = patience
        self._start = time.monotonic()
        self._next_s: dict[str, float] = {}

    def paused(self, what: str) -> None:
        """Report that `what` is paused, if it has been for long."""
        waited_s = time.monotonic() - self._start
        if self._is_due(what, waited_s, self._patience.paused_s):
            self._report(f"{what} has been paused for all of {waited_s:.0f} s; call its resume()")

    def report_slow(self, episodes: Sequence[EpisodeEngine]) -> None:
        """Report the running episodes without progress for the longest time."""
        now = time.monotonic()
        running = [episode for episode in episodes if not episode.is_finished]
        oldest_first = sorted(running, key=lambda episode: episode.since)
        own_code = [episode for episode in oldest_first if episode.num_generating == 0]
        generating = [episode for episode in oldest_first if episode.num_generating > 0]
        if own_code and self._is_due("own code", now - own_code[0].since, self._patience.own_code_s):
            self._report(
                f"{len(own_code)} episodes run a reward, a tool or workflow code, {episode_name(own_code[0])} "
                f"for {now - own_code[0].since:.0f} s: a slow call, or one that is stuck"
            )
        if generating and self._is_due("engine", now - generating[0].since, self._patience.generation_s):
            self._report(
                f"{len(generating)} episodes wait for the engine, {episode_name(generating[0])} for "
                f"{now - generating[0].since:.0f} s: are the completions long, or are the servers paused?"
            )

    def _is_due(self, what: str, waited_s: float, after_s: float) -> bool:
        if waited_s < self._next_s.setdefault(what, after_s):
            return False
        self._next_s[what] = 2 * waited_s
        return True

    def _report(self, text: str) -> None:
        logger.warning("waiting for %s: %s", self.wanted, text)


def episode_name(episode: EpisodeEngine) -> str:
    return f"prompt {episode.prompt_id}, sample {episode.sample_id}"


T = TypeVar("T")
P = ParamSpec("P")
STARTED_PER_TURN = 16  # prompts, in one turn of the event loop
logger = logging.getLogger(__name__)


class PromptFeed:
    """The prompts of `loader` in order, for `prepare_batch`; used on the event loop thread."""

    def __init__(self, loader: PromptLoader) -> None:
        self.loader = loader
        self._waiting: deque[tuple[int, Row]] = deque()

    def take(self) -> tuple[int, Row]:
        """Return the next `(prompt_id, row)`; never exhausted."""
        if not self._waiting:
            self._waiting.extend(self.loader.next_batch())
        return self._waiting.popleft()

    def state_dict(self, in_flight: list[int]) -> dict[str, Any]:
        """Return a state to continue from, in which the prompts `in_flight` come again first.

        These are the prompts that were taken and not trained on yet.
        """
        unused = [prompt_id for prompt_id, _ in self._waiting]
        return {"loader": self.loader.state_dict(), "prompts": [*in_flight, *unused]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state["loader"])
        self._waiting = deque((prompt_id, self.loader.row(prompt_id)) for prompt_id in state["prompts"])


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
        drops_incomplete: bool = False,
    ) -> None:
        self.engine = engine
        self.control = control
        self.check_format = check_format
        self.holds_rejected, self.drops_incomplete = holds_rejected, drops_incomplete
        self._is_paused = False
        self._patience = patience or Patience()
        self._tolerance = Tolerance(max_failures, control)
        self._task_ids = itertools.count()
        self._pending: deque[Group] = deque()
        self._running: dict[int, Group] = {}
        # Accepted or held, from the feed, not yet consumed; in the order in which they started.
        self._ready: list[Group] = []
        self._may_be_stale = False  # some of them, since the version or one of them changed
        self._is_starting = False  # a call of `_start_some` is queued
        self._done: dict[int, Group] = {}  # finished, from submit, not yet fetched
        self._feed: tuple[PromptFeed, Plan] | None = None
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

    async def prepare(self, feed: PromptFeed, plan: Plan, timeout_s: float | None) -> list[Group]:
        """Wait for the next batch of the feed's prompts; later ones keep being started."""
        self._feed = (feed, plan)
        self._start_more()
        return await self._until(self._take_batch, f"{self.control.batch_size} prompts", timeout_s)

    async def set_version(self, version: int) -> None:
        """Set the version of the trainer's weights, and start the prompts that it allows."""
        self.control.version = version
        self._may_be_stale = True
        self._something_happened()

    async def continue_at(self, version: int) -> None:
        self.control.continue_at(version)
        self._something_happened()

    async def set_paused(self, is_paused: bool) -> None:
        """Stop or resume starting prompts; running ones continue."""
        self._is_paused = is_paused
        self._something_happened()

    async def snapshot(self, read: Callable[[list[int]], T]) -> T:
        """Return `read(prompt_ids)` of the feed's prompts that no batch has taken, atomically."""
        groups = [*self._ready, *(group for group in self._running.values() if group.from_feed)]
        return read(sorted(group.prompt_id for group in groups))

    def _something_happened(self) -> None:
        self._start_more()
        self._wake()

    def _start_more(self) -> None:
        """Start the prompts that may start. Called after every event that can free capacity.

        A weight update may allow thousands of them, whose first steps would block the loop for
        seconds: few are started in each turn of the loop.
        """
        if not self._is_starting:
            self._start_some()

    def _start_some(self) -> None:
        self._is_starting = False
        try:
            for _ in range(STARTED_PER_TURN):
                if self._is_paused or self._error is not None or self.control.capacity() <= 0:
                    return
                group = self._next_group()
                if group is None:
                    return
                self._start(group)
            self._is_starting = True
            asyncio.get_running_loop().call_soon(self._start_some)
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
            enough = all if self.drops_incomplete else any
            accepted = enough(episode is not None for episode in rows) and is_accepted(
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
            insort(self._ready, group, key=lambda other: other.task_id)
            self._may_be_stale |= control.is_stale(group.version)
        self._something_happened()

    def _take_batch(self) -> list[Group] | None:
        """Return the prompts of the next batch, or None if the trainer must wait."""
        control = self.control
        if self._may_be_stale:
            self._drop_stale()
        chosen = None
        if len(self._ready) >= control.batch_size:  # called after every prompt
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
        self._may_be_stale = False
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


def blocking(
    method: Callable[Concatenate[Pipeline, P], Coroutine[Any, Any, T]],
) -> "Callable[Concatenate[Executor, P], T]":
    @wraps(method)
    def call(executor: "Executor", /, *args: P.args, **options: P.kwargs) -> T:
        return executor.loop.run(method(executor._pipeline, *args, **options))

    return call


class Executor:
    """A `Pipeline` for code without an event loop: it runs on the thread of a `LoopThread`.

    The methods block, and are called from any thread except that one. Batches are assembled on the
    calling thread, so that episodes continue meanwhile.

    Args:
        engine: samples tokens. It is closed with the executor, unless the thread is shared.
        control: the limits, and the counts of prompts.
        loop: the thread to share with another executor; by default one of its own.
        max_failures: prompts per batch whose episodes may raise; one more raises the episode's
            exception.
        check_format: check shapes, dtypes and masks of the tensors that workflows return.
        patience: the durations after which a wait is reported.
        holds_rejected: rejected prompts of a feed keep their place in a batch, which is then
            smaller, instead of being replaced.
        drops_incomplete: a prompt is rejected if its workflow returned no rows for a sample.
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
        holds_rejected: bool = False,
        drops_incomplete: bool = False,
    ) -> None:
        self.engine = engine
        self.control = control
        self.loop = loop or LoopThread()
        self._owns_loop = loop is None
        self._pipeline = Pipeline(
            engine, control, max_failures, check_format, patience, holds_rejected, drops_incomplete
        )
        self.scalars: Scalars = {}  # that the workflow recorded in the episodes of the last batch

    def submit(
        self,
        data: Row,
        workflow: RolloutWorkflow,
        *,
        prompt_id: int | None = None,
        n_samples: int = 1,
        should_accept: AcceptFn | None = None,
    ) -> int:
        """Queue a prompt and return its task id at once; it starts when the limits allow."""
        return self.loop.run(self._pipeline.submit(prompt_id, data, Plan(workflow, n_samples, should_accept)))

    def wait(self, count: int, timeout_s: float | None = None) -> list[Batch | None]:
        """Return the rows of `count` finished prompts, in the order in which they were submitted.

        A prompt that was rejected or failed has None instead of rows.

        Raises:
            TimeoutError: not so many have finished within `timeout_s`.
            RolloutStuck: not so many were submitted, or none of them can start.
            Exception: of an episode, beyond `max_failures` of them.
        """
        return [group.batch() for group in self.loop.run(self._pipeline.wait(count, timeout_s))]

    def wait_for_task(self, task_id: int, timeout_s: float | None = None) -> Batch | None:
        """Return the rows of one submitted prompt, or None, as `wait` does."""
        return self.loop.run(self._pipeline.wait_for_task(task_id, timeout_s)).batch()

    def rollout_batch(
        self,
        prompts: Sequence[tuple[int, Row]],
        workflow: RolloutWorkflow,
        *,
        n_samples: int = 1,
        should_accept: AcceptFn | None = None,
        timeout_s: float | None = None,
    ) -> Batch:
        """Run these `(prompt_id, row)` and return the accepted rows in canonical order.

        Raises:
            NothingAccepted: no prompt was accepted; and as `wait` does.
        """
        plan = Plan(workflow, n_samples, should_accept)
        groups = self.loop.run(self._pipeline.run_all(prompts, plan, timeout_s))
        accepted = [(group.prompt_id, group.rows) for group in groups if group.rows is not None]
        self.scalars = joined_scalars(groups)
        if not accepted:
            raise NothingAccepted(f"all {len(groups)} prompts were rejected or failed; look at their rewards")
        return assemble(accepted)

    def prepare_batch(
        self,
        feed: PromptFeed,
        workflow: RolloutWorkflow,
        *,
        n_samples: int = 1,
        should_accept: AcceptFn | None = None,
        timeout_s: float | None = None,
    ) -> Batch:
        """Return the rows of `control.batch_size` accepted prompts, in canonical order.

        The prompts of the next batches are sampled meanwhile and afterwards. With `holds_rejected`
        the batch is of that many prompts, of which at least one was accepted.

        Raises:
            NothingAccepted: too many prompts in a row were rejected; and as `wait` does.
        """
        plan = Plan(workflow, n_samples, should_accept)
        groups = self.loop.run(self._pipeline.prepare(feed, plan, timeout_s))
        self.scalars = joined_scalars(groups)
        return assemble([(group.prompt_id, group.rows) for group in groups if group.rows is not None])

    set_version = blocking(Pipeline.set_version)
    continue_at = blocking(Pipeline.continue_at)
    snapshot = blocking(Pipeline.snapshot)

    def pause(self) -> None:
        """Start no new prompts; running ones continue."""
        self.loop.run(self._pipeline.set_paused(True))

    def resume(self) -> None:
        """Start new prompts again."""
        self.loop.run(self._pipeline.set_paused(False))

    def close(self) -> None:
        """Cancel running prompts; close engine and thread, unless the thread is shared."""
        self.loop.run(self._pipeline.close())
        if self._owns_loop:
            self.engine.close()  # which may need the loop
            self.loop.close()
