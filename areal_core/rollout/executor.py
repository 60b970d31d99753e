"""The rollouts of one data-parallel rank, for code without an event loop.

trainer thread                               event loop thread (pipeline.py)
submit(data, workflow) --------------------> queues a prompt; starts it when the limits allow
prepare_batch(feed, ...)  <----------------- a batch that is ready, or the wait for one
... trains ...                               ... starts and finishes the prompts of the next batches ...
set_version(v) ----------------------------> starts what the version before did not allow
pause, resume -----------------------------> starts nothing, starts again; what runs goes on
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from areal_core.batch import Batch
from areal_core.dataset.tokens import Row
from areal_core.rollout.engine import InferenceEngine
from areal_core.rollout.episode import assemble
from areal_core.rollout.errors import NothingAccepted
from areal_core.rollout.feed import Feed
from areal_core.rollout.group import AcceptFn, Plan
from areal_core.rollout.loop_thread import LoopThread
from areal_core.rollout.pipeline import Pipeline
from areal_core.rollout.staleness import StalenessControl
from areal_core.rollout.watch import Patience
from areal_core.rollout.workflow import RolloutWorkflow

T = TypeVar("T")


class Executor:
    """Runs prompts through workflows. Its methods are called from any thread but its own.

    Args:
        engine: samples tokens. It is closed with the executor, unless the thread is shared.
        control: the limits, and the counts of what happened.
        loop: the thread to share with another executor; by default one of its own.
        max_failures: prompts per batch whose episodes may raise; one more raises the episode's own exception.
        check_format: check shapes, dtypes and masks of what workflows return.
        patience: when a wait is called long.
        holds_rejected: rejected prompts of a feed keep their place in a batch, which is then smaller, instead of being replaced.
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
    ) -> None:
        self.engine = engine
        self.control = control
        self.loop = loop or LoopThread()
        self._owns_loop = loop is None
        self._pipeline = Pipeline(engine, control, max_failures, check_format, patience, holds_rejected)

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
        return self.loop.run(self._pipeline.submit(prompt_id, data, Plan(workflow, n_samples, should_accept)))

    def wait(self, count: int, timeout_s: float | None = None) -> list[Batch | None]:
        """The rows of `count` submitted prompts that have finished, oldest first; None for one that was rejected or failed.

        Raises:
            TimeoutError, RolloutStuck, and the first exception of an episode beyond `max_failures`.
        """
        return [group.batch() for group in self.loop.run(self._pipeline.wait(count, timeout_s))]

    def wait_for_task(self, task_id: int, timeout_s: float | None = None) -> Batch | None:
        """The rows of one submitted prompt; None if it was rejected or failed. Raises as `wait` does."""
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
        """Runs these `(prompt_id, row)` and waits for all of them; the accepted rows in canonical order.

        Raises:
            NothingAccepted: not one was accepted; and as `wait` does.
        """
        plan = Plan(workflow, n_samples, should_accept)
        groups = self.loop.run(self._pipeline.run_all(prompts, plan, timeout_s))
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

        With `holds_rejected` that many prompts, of which at least one was accepted.

        Raises:
            NothingAccepted: prompt after prompt was rejected; and as `wait` does.
        """
        plan = Plan(workflow, n_samples, should_accept)
        groups = self.loop.run(self._pipeline.prepare(feed, plan, timeout_s))
        return assemble([(group.prompt_id, group.rows) for group in groups if group.rows is not None])

    def set_version(self, version: int) -> None:
        """Tells the version of the trainer's weights, and starts what it allows."""
        self.loop.run(self._pipeline.set_version(version))

    def continue_at(self, version: int) -> None:
        """Goes on in a run that has consumed a batch for each version before this one."""
        self.loop.run(self._pipeline.continue_at(version))

    def pause(self) -> None:
        """Starts no new prompt; those that run go on."""
        self.loop.run(self._pipeline.set_paused(True))

    def resume(self) -> None:
        self.loop.run(self._pipeline.set_paused(False))

    def snapshot(self, read: Callable[[list[int]], T]) -> T:
        """`read(prompt_ids)` of what the feed gave and no batch has taken yet, at one moment between two events."""
        return self.loop.run(self._pipeline.snapshot(read))

    def close(self) -> None:
        """Cancels what runs; closes engine and thread, unless the thread is shared."""
        self.loop.run(self._pipeline.close())
        if self._owns_loop:
            self.engine.close()  # which may need the loop
            self.loop.close()
