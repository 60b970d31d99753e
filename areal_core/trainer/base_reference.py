"""The reference of an adapted policy without a second model: the policy itself, with its adapter off."""

from dataclasses import dataclass

from torch import Tensor

from areal_core.batch import Batch
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.lora import adapters_off


@dataclass(frozen=True)
class BaseReference:
    """Scores with the model beneath an adapter, whose weights are frozen: the bits are those of an engine of its own."""

    actor: FSDPEngine

    def compute_logprobs(self, batch: Batch) -> Tensor:
        """As of `FSDPEngine`; a collective."""
        with adapters_off(self.actor.model):
            return self.actor.compute_logprobs(batch)
