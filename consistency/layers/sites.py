"""The operators of a decoder whose results are compared, in the order of their computation."""

from dataclasses import dataclass
from functools import cached_property, total_ordering

LINEAR = {
    "q": "q projection",
    "k": "k projection",
    "v": "v projection",
    "o": "output projection",
    "gate": "gate projection",
    "up": "up projection",
    "down": "down projection",
}


def with_adapter(name: str) -> dict[str, str]:
    """Return the entries of a linear layer: its own result, and the one with its adapter."""
    return {name: LINEAR[name], f"{name}_adapter": f"adapter of the {LINEAR[name]}"}


# Result -> operator. `pixels` are those of a row's images, `images` the embeddings with their
# features in the places of placeholders. The two results of rope and of the KV cache are one
# operator each.
BEFORE = {"pixels": "image processor", "embedding": "embedding", "images": "vision tower"}
IN_LAYER = (
    {"input_norm": "input norm"}
    | with_adapter("q")
    | with_adapter("k")
    | with_adapter("v")
    | {
        "q_norm": "q norm",
        "k_norm": "k norm",
        "rope_q": "rope",
        "rope_k": "rope",
        "cache_k": "KV cache",
        "cache_v": "KV cache",
        "attention": "attention",
    }
    | with_adapter("o")
    | {
        "attention_block": "attention block",
        "post_attention_norm": "norm after attention",
        "attention_residual": "residual after attention",
        "mlp_norm": "norm before the MLP",
        "router": "router",
        "routing": "choice of experts",
    }
    | with_adapter("gate")
    | with_adapter("up")
    | {"activation": "activation", "gated": "activation"}
    | with_adapter("down")
    | {
        "experts": "experts",
        "mlp": "MLP",
        "post_mlp_norm": "norm after the MLP",
        "residual": "residual after the MLP",
    }
)
AFTER = {"final_norm": "final norm", "head": "head", "logits": "soft cap of the logits"}
LABELS = BEFORE | IN_LAYER | AFTER
ORDER = {result: place for place, result in enumerate(LABELS)}


@total_ordering
@dataclass(frozen=True)
class Site:
    """One result of one layer, a key of `LABELS`; `layer` is None before and after the layers."""

    result: str
    layer: int | None = None

    @cached_property
    def place(self) -> tuple[int, int]:
        """Sort key: the order of computation."""
        if self.layer is not None:
            return self.layer, ORDER[self.result]
        return (-1 if self.result in BEFORE else 1 << 30), ORDER[self.result]

    def __lt__(self, other: "Site") -> bool:
        return self.place < other.place

    @property
    def operator(self) -> str:
        """The operator that computes it."""
        return LABELS[self.result]
