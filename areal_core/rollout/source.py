"""The interface of the trainer to its source of batches: live rollouts or a record."""

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor


class TrainedWeights(Protocol):
    """The part of a train engine that a weight update needs."""

    def named_full_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield every weight, unsharded, in the inference engine's dtype.

        Collective: every rank iterates to the end. May be iterated more than once.
        """

    def named_adapter_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the adapter's weights, unsharded, with the names of peft's files.

        Collective, as `named_full_tensors` is.
        """


def update_tensors(engine: TrainedWeights, adapter_only: bool) -> Iterable[tuple[str, Tensor]]:
    """Return the tensors of a weight update: every weight, or those of the adapter."""
    return engine.named_adapter_tensors() if adapter_only else engine.named_full_tensors()


class RolloutSource(Protocol):
    """The source of a trainer's batches."""

    def next_batch(self, step: int, version: int) -> dict[str, Tensor]:
        """Return this data-parallel rank's rows in canonical order.

        Keys, shapes and dtypes: ARCHITECTURE.md, "The batch".
        """

    def update_weights(self, engine: TrainedWeights, version: int) -> None:
        """Sample from the engine's weights, as `version`, from now on. Collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position in the data and its prompts in flight, as JSON types.

        Ranks differ where prompts are rejected.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; called before the first batch."""

    def close(self) -> None:
        """End threads and connections."""


class WithoutEngine:
    """What a source does that has no inference engine, and no state but the trainer's step."""

    def update_weights(self, engine: TrainedWeights, version: int) -> None:
        """Do nothing: there is no engine."""

    def state_dict(self) -> dict[str, Any]:
        """Return no state: the trainer's step number is enough."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state."""

    def close(self) -> None:
        """Do nothing: nothing stays open."""


class WrappedRollouts:
    """A `RolloutSource` that changes the batches of another one; all else is the other's.

    Args:
        sampled: the other one.
    """

    def __init__(self, sampled: RolloutSource) -> None:
        self.sampled = sampled

    def update_weights(self, engine: TrainedWeights, version: int) -> None:
        self.sampled.update_weights(engine, version)

    def state_dict(self) -> dict[str, Any]:
        return self.sampled.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampled.load_state_dict(state)

    def close(self) -> None:
        self.sampled.close()
