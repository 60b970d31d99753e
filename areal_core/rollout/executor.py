"""The rollouts of one data-parallel rank, for code without an event loop.

trainer thread                               event loop thread (pipeline.py)
submit(data, workflow) --------------------> queues a prompt; starts it when the limits allow
prepare_batch(feed, ...)  <----------------- a batch that is ready, or the wait for one
... trains ...                               ... starts and finishes the prompts of the next batches ...
set_version(v) ----------------------------> starts what the previous version did not allow
pause, resume -----------------------------> stops, restarts new prompts; running ones continue
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
    """Run prompts through workflows. Its methods are called from any thread except its own.

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
        """Return the rows of `control.batch_size` accepted prompts, in canonical order.

        The prompts of the next batches are sampled meanwhile and afterwards. With `holds_rejected`
        the batch is of that many prompts, of which at least one was accepted.

        Raises:
            NothingAccepted: too many prompts in a row were rejected; and as `wait` does.
        """
        plan = Plan(workflow, n_samples, should_accept)
        groups = self.loop.run(self._pipeline.prepare(feed, plan, timeout_s))
        return assemble([(group.prompt_id, group.rows) for group in groups if group.rows is not None])

    def set_version(self, version: int) -> None:
        """Set the version of the trainer's weights, and start the prompts that it allows."""
        self.loop.run(self._pipeline.set_version(version))

    def continue_at(self, version: int) -> None:
        """Continue a run that has consumed a batch for each version before this one."""
        self.loop.run(self._pipeline.continue_at(version))

    def pause(self) -> None:
        """Start no new prompts; running ones continue."""
        self.loop.run(self._pipeline.set_paused(True))

    def resume(self) -> None:
        """Start new prompts again."""
        self.loop.run(self._pipeline.set_paused(False))

    def snapshot(self, read: Callable[[list[int]], T]) -> T:
        """Return `read(prompt_ids)` of the feed's prompts that no batch has taken, atomically."""
        return self.loop.run(self._pipeline.snapshot(read))

    def close(self) -> None:
        """Cancel running prompts; close engine and thread, unless the thread is shared."""
        self.loop.run(self._pipeline.close())
        if self._owns_loop:
            self.engine.close()  # which may need the loop
            self.loop.close()
