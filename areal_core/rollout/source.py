"""Where the trainer's batches come from and where its weights go: live rollouts or a record, behind one seam."""

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor


class TrainedWeights(Protocol):
    """The part of a train engine that a push needs."""

    def named_full_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Every weight, whole, in the inference engine's dtype; perhaps iterated twice. Collective: every rank iterates to the end."""
        ...

    def named_adapter_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """What an adapted model trains, whole, under the names of peft's files. Collective, as `named_full_tensors` is."""
        ...


def pushed_tensors(engine: TrainedWeights, pushes_adapter: bool) -> Iterable[tuple[str, Tensor]]:
    """What a push brings to the inference engine: every weight, or of an adapted model what it trains."""
    return engine.named_adapter_tensors() if pushes_adapter else engine.named_full_tensors()


class RolloutSource(Protocol):
    """Gives a trainer its batches."""

    def next_batch(self, step: int, version: int) -> dict[str, Tensor]:
        """This data-parallel rank's rows in canonical order (keys, shapes and dtypes: ARCHITECTURE.md, "The batch")."""
        ...

    def update_weights(self, engine: TrainedWeights, version: int) -> None:
        """Makes what is sampled from now on come from the engine's weights, named `version`. Collective."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """This rank's position in the data and what is in flight, as JSON types; ranks differ where prompts are rejected."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`; called before the first batch."""
        ...

    def close(self) -> None:
        """Ends threads and connections."""
        ...
