"""Live rollouts as the trainer's source of batches, of one rank or shared by a group of ranks.

trainer thread                                        event loop thread (pipeline.py)
next_batch(step, v) -- prepare_batch ---------------> a batch that is ready, or the wait for one;
the next ones are sampled
... trains ...                                        ... episodes continue ...
update_weights(v + 1): weight update (generation      ... their requests are sent again and continue with the new weights ...
  is paused and resumed), set_version --------------> starts what version v did not allow

Ranks of one model-parallel group hold the same rows: rank 0 of the group samples them for all.

rank 0   next_batch: executor ... batch ── share ──> trains ── update_weights: send ── executor: next version
others   next_batch: wait for rank 0 ───── share ──> trains ── update_weights: send (its collectives)

The other ranks wait in `share`, a collective of the group, as long as rank 0 waits for its
rollouts.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_core.agent.episode_stats import describe_broken, log_episodes
from areal_core.data.loader import PromptLoader
from areal_core.engine.determinism import rng_state, set_rng_state
from areal_core.rollout.episodes import AcceptFn
from areal_core.rollout.pipeline import Executor, PromptFeed
from areal_core.rollout.source import TrainedWeights, update_tensors
from areal_core.rollout.workflow import RolloutWorkflow
from areal_core.safety.durable import disk_errors_as_warnings
from areal_core.servers.health import Health
from areal_core.servers.weight_update import WeightUpdate
from areal_core.telemetry.in_episode import Scalars
from areal_core.telemetry.stats import Reduce, Stats

COUNTS = ("rejected", "failed", "stale")  # of a run; the accepted ones follow from its version
logger = logging.getLogger(__name__)
Share = Callable[[Any], Any]  # rank 0's value -> the same on every rank of the group


class LiveRollouts:
    """A `RolloutSource` that samples with an inference engine.

    Args:
        executor: runs the episodes; closed, with its engine, when this is.
        loader: the prompts.
        workflow: runs one episode.
        weight_update: transfers new weights to the engine; None when the engine reads the
            trainer's own.
        n_samples: episodes per prompt.
        should_accept: decides from a prompt's rows whether to train on them.
        stats: records rewards and counts under `rollout/`.
        adapter_only: the weight update sends the adapter, not the merged weights.
        health: the servers' health, recorded under `rollout/` too; None without servers.
        health_file: where it is written after each batch, and at the end.
    """

    def __init__(
        self,
        executor: Executor,
        loader: PromptLoader,
        workflow: RolloutWorkflow,
        weight_update: WeightUpdate | None = None,
        *,
        n_samples: int = 1,
        should_accept: AcceptFn | None = None,
        stats: Stats | None = None,
        adapter_only: bool = False,
        health: Health | None = None,
        health_file: Path | None = None,
    ) -> None:
        self.executor = executor
        self.feed = PromptFeed(loader)
        self.workflow = workflow
        self.weight_update = weight_update
        self.n_samples = n_samples
        self.should_accept = should_accept
        self.stats = stats or Stats()
        self.adapter_only = adapter_only
        self.health, self.health_file = health, health_file
        self._has_started = False
        self._has_warned = False  # of broken prefixes

    def next_batch(self, step: int, version: int) -> dict[str, Tensor]:
        """Return the next finished and accepted prompts.

        Raises as `Executor.prepare_batch` does.
        """
        if not self._has_started:
            self.executor.continue_at(version)
            self._has_started = True
        batch = self.executor.prepare_batch(
            self.feed, self.workflow, n_samples=self.n_samples, should_accept=self.should_accept
        )
        log_rollouts(self.stats, self.executor, batch)
        self._log_health()
        if not self._has_warned and (broken := describe_broken(batch)):
            self._has_warned = True
            logger.warning("%s", broken)
        return batch

    def _log_health(self) -> None:
        if self.health is not None:
            with self.stats.scope("rollout"):
                self.stats.scalar(**self.health.summary())
            if self.health_file is not None:
                with disk_errors_as_warnings("the health of the servers is not written"):
                    self.health.write(self.health_file)

    def update_weights(self, engine: TrainedWeights, version: int) -> None:
        """Send the weights to the engine, then start the prompts that the new version allows."""
        # Collective: every rank enters the update, though only rank 0 talks to the servers.
        if self.weight_update is not None:
            self.weight_update.send(update_tensors(engine, self.adapter_only), version)
        self.use_weights(version)
        # Last: prompts that start from now on are sampled by the new weights alone.
        self.start_version(version)

    def use_weights(self, version: int) -> None:
        self.executor.engine.set_version(version)

    def start_version(self, version: int) -> None:
        self.executor.set_version(version)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position, the prompts in flight, and the counts of the others."""

        def read(in_flight: list[int]) -> dict[str, Any]:
            counts = {name: getattr(self.executor.control, name) for name in COUNTS}
            return self.feed.state_dict(in_flight) | {"counts": counts}

        return self.executor.snapshot(read)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`: prompts in flight are sampled again first.

        Call before the first batch.
        """
        self.feed.load_state_dict(state)
        for name, count in state.get("counts", {}).items():  # older checkpoints have none
            setattr(self.executor.control, name, int(count))

    def close(self) -> None:
        """Close the weight update and the executor; name the servers that had a fault."""
        if self.health is not None:
            for line in self.health.lines():
                logger.warning("inference server %s", line)
        if self.weight_update is not None:
            self.weight_update.close()
        self.executor.close()


def log_rollouts(stats: Stats, executor: Executor, batch: dict[str, Tensor]) -> None:
    """Record rewards and scores, and per rank the prompts since the start and those running now."""
    control = executor.control
    with stats.scope("rollout"):
        stats.denominator(n_seqs=torch.ones_like(batch["rewards"], dtype=torch.bool))
        scores = {key: values for key, values in batch.items() if key.startswith("scores.")}
        stats.stat("n_seqs", Reduce.AVG, reward=batch["rewards"], **scores)
        stats.scalar(
            accepted=control.accepted,
            rejected=control.rejected,
            failed=control.failed,
            stale=control.stale,
            running=control.running,
        )
        log_episodes(stats, batch)
    log_scalars(stats, executor.scalars, "workflow")


def log_scalars(stats: Stats, scalars: Scalars, scope: str) -> None:
    """Record the numbers of a workflow under `scope`: their means over calls and ranks."""
    with stats.scope(scope):
        for name, values in scalars.items():
            for value in values:
                stats.scalar(**{name: value})


@dataclass(eq=False)
class SharedRollouts:
    """A `RolloutSource` on each rank of a group.

    Args:
        sampled: the rollouts of rank 0 of the group; None on its other ranks.
        weight_update: takes part in sending weights, on the other ranks; None where these only
            gather the tensors.
        share: returns rank 0's value on every rank of the group; a collective of the group.
        adapter_only: as of `LiveRollouts`.
    """

    sampled: LiveRollouts | None
    weight_update: WeightUpdate | None
    share: Share
    adapter_only: bool = False

    def next_batch(self, step: int, version: int) -> dict[str, Tensor]:
        """Return rank 0's batch, and adopt its random state, as a replay of the batch does."""
        sampled = None
        if self.sampled is not None:
            sampled = (self.sampled.next_batch(step, version), rng_state())
        batch, states = self.share(sampled)
        set_rng_state(states)
        return batch

    def update_weights(self, engine: TrainedWeights, version: int) -> None:
        """Send the weights, or take part in gathering them."""
        if self.sampled is not None:
            self.sampled.update_weights(engine, version)
            return
        tensors = update_tensors(engine, self.adapter_only)
        if self.weight_update is not None:
            self.weight_update.send(tensors, version)
        else:
            for _ in tensors:  # rank 0, which loads them, is in each `full_tensor`
                pass

    def use_weights(self, version: int) -> None:
        if self.sampled is not None:
            self.sampled.use_weights(version)

    def start_version(self, version: int) -> None:
        if self.sampled is not None:
            self.sampled.start_version(version)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of rank 0; the other ranks have none."""
        return {} if self.sampled is None else self.sampled.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state` on rank 0."""
        if self.sampled is not None:
            self.sampled.load_state_dict(state)

    def close(self) -> None:
        """Close the rollouts or the weight update."""
        if self.sampled is not None:
            self.sampled.close()
        elif self.weight_update is not None:
            self.weight_update.close()
