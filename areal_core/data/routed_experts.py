"""The batch key `routed_experts`: the experts that the engine has chosen for each token.

`[B, T, layers, top_k]` int16. Position t holds the experts of token t as an input; of the last
token of a row there are none, because no engine computes it. Layers without experts hold 0.

With the weights by which the outputs of the experts are added, it is `[B, T, layers, 2 top_k]` int32:
the experts, then the bits of their float32 weights. `UNKNOWN` are the bits of a NaN.
"""

from dataclasses import dataclass
from typing import Any

ROUTED_EXPERTS = "routed_experts"
UNKNOWN = -1  # the engine did not report the experts of this token


@dataclass(frozen=True)
class RoutingSizes:
    """The sizes of a model's choices: all layers, experts of a token, experts of a layer."""

    num_layers: int
    top_k: int
    num_experts: int

    def check(self, chosen: Any) -> None:
        """Raise ValueError unless an array, or a tensor, of integers holds choices in this model.

        Args:
            chosen: [tokens, layers, top_k], or 2 top_k with weights.
        """
        expected = (self.num_layers, self.top_k)
        if chosen.shape[1:] not in (expected, (self.num_layers, 2 * self.top_k)):
            raise ValueError(
                f"routed_experts are of {list(chosen.shape[1:])} layers and experts of a token, and the model "
                f"has {list(expected)}: they were recorded with another model"
            )
        chosen = chosen[..., : self.top_k]
        least, most = (int(chosen.min()), int(chosen.max())) if len(chosen) else (0, 0)
        if not UNKNOWN <= least <= most < self.num_experts:
            raise ValueError(
                f"routed_experts name expert {least if least < UNKNOWN else most}, and the model has "
                f"{self.num_experts} experts: they were recorded with another model"
            )
