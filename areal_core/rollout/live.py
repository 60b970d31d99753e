"""Batches sampled now: an executor that is fed from a loader, as the trainer's source.

trainer thread                                        event loop thread (executor.py)
next_batch(step, v) -- prepare_batch ---------------> a batch that is ready, or the wait for one; the next ones are sampled on
... trains ...                                        ... episodes go on ...
update_weights(v + 1): push (generation is cut and    ... their requests are sent again and go on with the new weights ...
  resumed), set_version ----------------------------> starts what version v did not allow
"""

from typing import Any

import torch
from torch import Tensor

from areal_core.rollout.executor import Executor
from areal_core.rollout.feed import PromptFeed, PromptLoader
from areal_core.rollout.group import AcceptFn
from areal_core.rollout.source import TrainedWeights, pushed_tensors
from areal_core.rollout.weight_push import WeightPush
from areal_core.rollout.workflow import RolloutWorkflow
from areal_core.telemetry.stats import Reduce, Stats

COUNTS = ("rejected", "failed", "stale")  # of a run; how many were accepted follows from its version


class LiveRollouts:
    """A `RolloutSource` that samples with an inference engine.

    Args:
        executor: runs the episodes; closed, with its engine, when this is.
        loader: gives the prompts.
        workflow: runs one episode.
        push: brings new weights to the engine; None when the engine reads the trainer's own.
        n_samples: episodes per prompt.
        should_accept: which prompts are trained on, told their rows.
        stats: gets rewards and counts under `rollout/`.
        pushes_adapter: the push takes the adapter, not the weights with the adapter in them.
    """

    def __init__(
        self,
        executor: Executor,
        loader: PromptLoader,
        workflow: RolloutWorkflow,
        push: WeightPush | None = None,
        *,
        n_samples: int = 1,
        should_accept: AcceptFn | None = None,
        stats: Stats | None = None,
        pushes_adapter: bool = False,
    ) -> None:
        self.executor = executor
        self.feed = PromptFeed(loader)
        self.workflow = workflow
        self.push = push
        self.n_samples = n_samples
        self.should_accept = should_accept
        self.stats = stats or Stats()
        self.pushes_adapter = pushes_adapter
        self._has_begun = False

    def next_batch(self, step: int, version: int) -> dict[str, Tensor]:
        """The next prompts that are finished and accepted. Raises as `Executor.prepare_batch` does."""
        if not self._has_begun:
            self.executor.continue_at(version)
            self._has_begun = True
        batch = self.executor.prepare_batch(
            self.feed, self.workflow, n_samples=self.n_samples, should_accept=self.should_accept
        )
        log_rollouts(self.stats, self.executor, batch)
        return batch

    def update_weights(self, engine: TrainedWeights, version: int) -> None:
        # Collective: every rank enters the push, though only rank 0 talks to the servers.
        if self.push is not None:
            self.push.push(pushed_tensors(engine, self.pushes_adapter), version)
        self.executor.engine.set_version(version)
        # Last: what starts from now on is sampled by the new weights alone.
        self.executor.set_version(version)

    def state_dict(self) -> dict[str, Any]:
        """The loader's position, the ids of the prompts that were taken and not yet trained on, and what became of others."""

        def read(in_flight: list[int]) -> dict[str, Any]:
            counts = {name: getattr(self.executor.control, name) for name in COUNTS}
            return self.feed.state_dict(in_flight) | {"counts": counts}

        return self.executor.snapshot(read)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`: the prompts that were in flight are sampled again, first. Call before the first batch."""
        self.feed.load_state_dict(state)
        for name, count in state.get("counts", {}).items():  # older checkpoints have none
            setattr(self.executor.control, name, count)

    def close(self) -> None:
        if self.push is not None:
            self.push.close()
        self.executor.close()


def log_rollouts(stats: Stats, executor: Executor, batch: dict[str, Tensor]) -> None:
    """The rewards, and, per rank, what has become of the prompts since the run began and how many are at work now."""
    control = executor.control
    with stats.scope("rollout"):
        stats.denominator(n_seqs=torch.ones_like(batch["rewards"], dtype=torch.bool))
        stats.stat("n_seqs", Reduce.AVG, reward=batch["rewards"])
        stats.scalar(
            accepted=control.accepted,
            rejected=control.rejected,
            failed=control.failed,
            stale=control.stale,
            running=control.running,
        )
