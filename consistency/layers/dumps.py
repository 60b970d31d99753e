"""From what `dump_hook` wrote in SGLang or vLLM to the values of sites.

Both have fused modules of the same names: `qkv_proj` and `gate_up_proj`, norms that add the
residual, and an attention module that gets rotated queries and keys.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from areal_core.engine.model import is_vision
from consistency.layers.hooks import dense_routing
from consistency.layers.observed import RowValues
from consistency.layers.sites import Site

LEAVES = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    "self_attn", "self_attn.qkv_proj", "self_attn.q_norm", "self_attn.k_norm", "self_attn.attn",
    "self_attn.o_proj", "mlp", "mlp.gate_up_proj", "mlp.act_fn", "mlp.down_proj", "mlp.gate", "mlp.topk",
    "mlp.experts",
)  # fmt: skip
FINAL_NORM, LOGITS, FIRST = "model.norm", "logits_processor", "model.layers.0.input_layernorm"
PLAIN = {
    "self_attn": "attention_block",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "self_attn.o_proj": "o",
    "mlp": "mlp",
    "mlp.act_fn": "gated",
    "mlp.down_proj": "down",
    "mlp.gate": "router",
    "mlp.experts": "experts",
    "post_feedforward_layernorm": "post_mlp_norm",
}
Call = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """What the names of fused tensors need: sizes of a model."""

    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary_size: int
    num_experts: int
    max_length: int
    has_softcap: bool
    has_window: bool
    has_images: bool

    @classmethod
    def of(cls, path: str | Path) -> Self:
        """Read the sizes from a model's config."""
        whole = AutoConfig.from_pretrained(path)
        config: Any = whole.get_text_config()
        heads = config.num_attention_heads
        return cls(
            config.num_hidden_layers,
            heads,
            getattr(config, "num_key_value_heads", heads),
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            config.vocab_size,
            getattr(config, "num_experts", 0),
            config.max_position_embeddings,
            getattr(config, "final_logit_softcapping", None) is not None,
            getattr(config, "sliding_window", None) is not None,
            is_vision(whole),
        )

    def modules(self) -> list[str]:
        """Return the names of the modules to hook; a model lacks some of them."""
        layers = [f"model.layers.{layer}.{leaf}" for layer in range(self.num_layers) for leaf in LEAVES]
        return [*layers, FINAL_NORM, LOGITS]


def read_row(folder: Path, row: list[int], shape: Shape) -> RowValues:
    calls: dict[str, list[Call]] = defaultdict(list)
    for file in sorted(folder.glob("*.safetensors")):
        calls[file.name.rsplit(".", 2)[0]].append(load_file(file))
    values, start = RowValues(len(row)), 0
    has_two_norms = "model.layers.0.pre_feedforward_layernorm" in calls
    for number, first in enumerate(calls[FIRST]):
        end = start + len(first["in0"])
        values.put(Site("images" if shape.has_images else "embedding"), start, first["in0"])
        for name, of_module in calls.items():
            for site, value in sites_of(name, of_module[number], shape, has_two_norms):
                num_rows = len(value) if site.result in ("head", "logits") else end - start
                values.put(site, end - num_rows, value.reshape(num_rows, -1))
        start = end
    return values


def sites_of(name: str, call: Call, shape: Shape, has_two_norms: bool) -> Iterator[tuple[Site, Tensor]]:
    if name == LOGITS:
        logits = call["out0"][:, : shape.vocabulary_size]
        yield Site("logits" if shape.has_softcap else "head"), logits
        return
    if name == FINAL_NORM:
        yield Site("final_norm"), call["out0"]
        if "out1" in call:
            yield Site("residual", shape.num_layers - 1), call["out1"]
        return
    _, _, number, leaf = name.split(".", 3)
    layer = int(number)
    if leaf in PLAIN:
        yield Site(PLAIN[leaf], layer), call["out0"]
    elif leaf == "input_layernorm":
        yield Site("input_norm", layer), call["out0"]
        if "out1" in call and layer:
            yield Site("residual", layer - 1), call["out1"]
    elif leaf == "post_attention_layernorm" and has_two_norms:
        yield Site("post_attention_norm", layer), call["out0"]
    elif leaf in ("post_attention_layernorm", "pre_feedforward_layernorm"):
        yield Site("mlp_norm", layer), call["out0"]
        if "out1" in call:
            yield Site("attention_residual", layer), call["out1"]
    elif leaf == "self_attn.qkv_proj":
        sizes = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        for result, value in zip("qkv", call["out0"].split(sizes, dim=-1), strict=True):
            yield Site(result, layer), value
    elif leaf == "self_attn.attn":
        names = {"in0": "rope_q", "in1": "rope_k", "kv0": "cache_k", "kv1": "cache_v", "out0": "attention"}
        for key in names.keys() & call.keys():
            yield Site(names[key], layer), call[key]
    elif leaf == "mlp.gate_up_proj":
        for result, value in zip(("gate", "up"), call["out0"].chunk(2, dim=-1), strict=True):
            yield Site(result, layer), value
    elif leaf == "mlp.topk" and {"out0", "out1"} <= call.keys():
        yield Site("routing", layer), dense_routing(call["out1"], call["out0"], shape.num_experts)
