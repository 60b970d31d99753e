"""One batch for ranks that hold the same rows: rank 0 of their group samples it.

rank 0   next_batch: executor ... batch ── share ──> trains ── update_weights: send ── executor: next version
others   next_batch: wait for rank 0 ───── share ──> trains ── update_weights: send (its collectives)

The other ranks wait in `share`, a collective of the group, as long as rank 0 waits for its
rollouts.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from areal_core.engine.determinism import rng_state, set_rng_state
from areal_core.rollout.live import LiveRollouts
from areal_core.rollout.source import TrainedWeights, update_tensors
from areal_core.rollout.weight_push import WeightUpdate

Share = Callable[[Any], Any]


class SharedRollouts:
    """A `RolloutSource` on each rank of a group.

    Args:
        sampled: the rollouts of rank 0 of the group; None on its other ranks.
        weight_update: takes part in sending weights, on the other ranks; None where these only
            gather the tensors.
        share: returns rank 0's value on every rank of the group; a collective of the group.
        adapter_only: as of `LiveRollouts`.
    """

    def __init__(
        self,
        sampled: LiveRollouts | None,
        weight_update: WeightUpdate | None,
        share: Share,
        adapter_only: bool = False,
    ) -> None:
        self.sampled, self.weight_update = sampled, weight_update
        self.share, self.adapter_only = share, adapter_only

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
