"""One batch for ranks that hold the same rows: the head of their group samples it.

head     next_batch: executor ... batch ── share ──> trains ── update_weights: push ── executor: next version
others   next_batch: wait for the head's ─ share ──> trains ── update_weights: push (its collectives)

The others wait in `share`, a collective of the group, for as long as the head waits for its rollouts.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from areal_core.engine.determinism import rng_state, set_rng_state
from areal_core.rollout.live import LiveRollouts
from areal_core.rollout.source import TrainedWeights, pushed_tensors
from areal_core.rollout.weight_push import WeightPush

Share = Callable[[Any], Any]


class SharedRollouts:
    """A `RolloutSource` on each rank of a group.

    Args:
        sampled: the rollouts of the group's head; None on its other ranks.
        push: on the other ranks, their part in bringing weights to the engine; None where that is to gather them.
        share: the head's value on every rank of the group; a collective of the group.
        pushes_adapter: as of `LiveRollouts`.
    """

    def __init__(
        self,
        sampled: LiveRollouts | None,
        push: WeightPush | None,
        share: Share,
        pushes_adapter: bool = False,
    ) -> None:
        self.sampled, self.push, self.share, self.pushes_adapter = sampled, push, share, pushes_adapter

    def next_batch(self, step: int, version: int) -> dict[str, Tensor]:
        """The head's batch, and its random state, with which a replay goes on from the batch, too."""
        sampled = None
        if self.sampled is not None:
            sampled = (self.sampled.next_batch(step, version), rng_state())
        batch, states = self.share(sampled)
        set_rng_state(states)
        return batch

    def update_weights(self, engine: TrainedWeights, version: int) -> None:
        if self.sampled is not None:
            self.sampled.update_weights(engine, version)
            return
        tensors = pushed_tensors(engine, self.pushes_adapter)
        if self.push is not None:
            self.push.push(tensors, version)
        else:
            for _ in tensors:  # the head, which loads them, is in each `full_tensor`
                pass

    def state_dict(self) -> dict[str, Any]:
        """That of the head; the other ranks keep nothing."""
        return {} if self.sampled is None else self.sampled.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.sampled is not None:
            self.sampled.load_state_dict(state)

    def close(self) -> None:
        if self.sampled is not None:
            self.sampled.close()
        elif self.push is not None:
            self.push.close()
