"""The reference model of a LoRA policy without a second copy: the policy, adapter disabled."""

from dataclasses import dataclass

from torch import Tensor

from areal_core.batch import Batch
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.lora import adapters_off


@dataclass(frozen=True)
class BaseReference:
    """The frozen base model of an adapted policy; bitwise the log-probs of a separate engine."""

    actor: FSDPEngine

    def compute_logprobs(self, batch: Batch) -> Tensor:
        """Compute log-probs as `FSDPEngine` does; a collective."""
        with adapters_off(self.actor.model):
            return self.actor.compute_logprobs(batch)
