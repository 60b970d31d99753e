"""Planted faults of one operator each: an engine's model that differs from the reference there."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Cache
from transformers.activations import ACT2FN

SIZES: dict[str, Any] = {
    "vocab_size": 103,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
GEMMA: dict[str, Any] = {"tie_word_embeddings": True, "sliding_window": 8, "query_pre_attn_scalar": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "mistral": {"tie_word_embeddings": False, "sliding_window": 12},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "qwen3_moe": {
        "tie_word_embeddings": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    "gemma2": GEMMA
    | {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": GEMMA | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
}


def make_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a random model of a family; every weight is random, biases and norms too."""
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.to(dtype).eval().requires_grad_(False)


def with_config(model: Any, change: Callable[[Any], None]) -> Any:
    """Return a model of the same weights with a changed config."""
    config = copy.deepcopy(model.config)
    change(config)
    changed = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    changed.load_state_dict(model.state_dict(), strict=False)
    return changed.eval().requires_grad_(False)


@dataclass(frozen=True)
class Fault:
    """One fault and where it is.

    Attributes:
        config: changes the config of the engine's model.
        edit: changes the engine's model in place.
        running: a context in which the engine computes.
        adapter: both sides have a LoRA adapter on these projections.
    """

    name: str
    family: str
    layer: int | None
    operator: str
    config: Callable[[Any], None] | None = None
    edit: Callable[[Any], None] | None = None
    running: Callable[[], AbstractContextManager[Any]] = nullcontext
    adapter: tuple[str, ...] = field(default=())

    def sides(self, dtype: torch.dtype) -> tuple[Any, Any]:
        """Return the reference's model and the engine's."""
        model = make_model(self.family, dtype)
        if self.adapter:
            model = with_adapter(model, self.adapter)
        engine = with_config(model, self.config) if self.config else copy.deepcopy(model)
        if self.edit:
            self.edit(engine)
        return model, engine


def with_adapter(model: Any, projections: tuple[str, ...]) -> Any:
    """Return the model with a random LoRA adapter."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        options = LoraConfig(r=4, lora_alpha=8, target_modules=list(projections), init_lora_weights=False)
        return get_peft_model(model, options).to(model.dtype).eval().requires_grad_(False)


def rope(key: str | None = None, **changes: Any) -> Callable[[Any], None]:
    """Change the parameters of rope; `key` is a type of layers that has its own."""

    def change(config: Any) -> None:
        own = config.rope_parameters if key is None else config.rope_parameters[key]
        own.update(changes)

    return change


def option(**changes: Any) -> Callable[[Any], None]:

    def change(config: Any) -> None:
        for name, value in changes.items():
            setattr(config, name, value)

    return change


def at(path: str, edit: Callable[[Any], None]) -> Callable[[Any], None]:
    """Edit the module of that name, below the decoder's layers."""
    return lambda model: edit(model.get_submodule(f"model.layers.{path}"))


def drift(scale: float, *names: str) -> Callable[[Any], None]:
    """Move weights whose name contains one of `names` (all by default), as an older version has."""

    def edit(module: nn.Module) -> None:
        generator = torch.Generator().manual_seed(2)
        for name, weight in module.named_parameters():
            if not names or any(wanted in name for wanted in names):
                noise = torch.randn(weight.shape, generator=generator) * weight.float().std()
                weight.data.add_((scale * noise).to(weight.dtype))

    return edit


def without_bias(module: nn.Linear) -> None:
    module.bias = None


def replaced(name: str, make: Callable[[], nn.Module]) -> Callable[[Any], None]:
    return lambda module: setattr(module, name, make())


def exchanged(left: str, right: str) -> Callable[[Any], None]:
    """Exchange the weights of two modules of the same shape."""

    def edit(module: nn.Module) -> None:
        a, b = module.get_submodule(left), module.get_submodule(right)
        for one, other in zip(a.parameters(), b.parameters(), strict=True):
            one.data, other.data = other.data, one.data

    return edit


def in_float8(module: nn.Module) -> None:
    """Round the weight to float8, as a quantised checkpoint has."""
    weight = module.weight.data  # type: ignore[union-attr]
    module.weight.data = weight.to(torch.float8_e4m3fn).to(weight.dtype)  # type: ignore[union-attr]


def in_every_layer(edit: Callable[[Any], None]) -> Callable[[Any], None]:

    def edit_all(model: Any) -> None:
        for layer in model.model.layers:
            edit(layer)

    return edit_all


def wide_eps(layer: Any) -> None:
    """Give the norm before the MLP another eps."""
    layer.post_attention_layernorm.variance_epsilon = 1e-2


def attribute(**values: Any) -> Callable[[Any], None]:

    def edit(module: nn.Module) -> None:
        for name, value in values.items():
            setattr(module, name, value)

    return edit


def swapped_experts(module: Any) -> None:
    """Exchange the weights of experts 0 and 1."""
    for weight in module.parameters():
        weight.data[[0, 1]] = weight.data[[1, 0]]


def swapped_halves(module: Any) -> None:
    """Exchange the gate's and the up projection's half of every expert."""
    module.gate_up_proj.data = module.gate_up_proj.data.roll(module.gate_up_proj.shape[1] // 2, dims=1)


def swapped_heads(module: Any) -> None:
    """Exchange the two key heads."""
    module.weight.data = module.weight.data.roll(SIZES["head_dim"], dims=0)


def swapped_projections(layer: Any) -> None:
    """Exchange the weights of gate and up projection."""
    exchanged("gate_proj", "up_proj")(layer.mlp)


def without_norm(name: str, only: int | None = None) -> Callable[[Any], None]:
    """Drop a norm of heads in every layer, or in one."""

    def edit(model: Any) -> None:
        for number, layer in enumerate(model.model.layers):
            if only in (None, number):
                setattr(layer.self_attn, name, nn.Identity())

    return edit


def without_last_norm(layer: Any) -> None:
    layer.post_feedforward_layernorm = nn.Identity()


def without_one(layer: Any) -> None:
    """Let Gemma's norm multiply by w, where its class multiplies by 1 + w."""
    layer.input_layernorm.weight.data.sub_(1)


def untied(model: Any) -> None:
    """Give the head weights of its own."""
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    drift(0.02)(head)


def wrong_rows(model: Any) -> None:
    """Give the last tokens of the vocabulary other embeddings, as a resize does."""
    weight = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    weight.data[-20:] = weight.data[-20:].roll(1, dims=0)


def unscaled(model: Any) -> None:
    """Leave out the scale of the embeddings."""
    model.get_input_embeddings().embed_scale.fill_(1.0)


def residual_of_the_norm(layer: Any) -> None:
    """Add the normed hidden states in place of the hidden states."""

    def forward(hidden_states: Tensor, **options: Any) -> Tensor:
        normed = layer.input_layernorm(hidden_states)
        attended, _ = layer.self_attn(hidden_states=normed, **options)
        hidden = normed + attended
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    layer.forward = forward


def adapter_scale(scale: float, name: str = "layers.") -> Callable[[Any], None]:
    """Set the scale of adapters whose name contains a string."""

    def edit(model: Any) -> None:
        for path, module in model.named_modules():
            if name in path and hasattr(module, "lora_A"):
                module.scaling["default"] = scale

    return edit


def rounded_cache(
    dtype: torch.dtype | None, keys: bool = True, values: bool = True, layer: int | None = None
) -> Callable[[], AbstractContextManager[Any]]:
    """Store keys or values of a layer (None: all) in `dtype`; None is int8, scaled per token."""

    def quantise(tensor: Tensor) -> Tensor:
        if dtype is not None:
            return tensor.to(dtype).to(tensor.dtype)
        scale = tensor.abs().amax(-1, keepdim=True) / 127
        return (tensor / scale).round() * scale

    update = Cache.update

    def store(cache: Cache, key: Tensor, value: Tensor, layer_idx: int, *rest: Any, **options: Any) -> Any:
        if layer is None or layer_idx == layer:
            key, value = quantise(key) if keys else key, quantise(value) if values else value
        return update(cache, key, value, layer_idx, *rest, **options)

    return lambda: patch.object(Cache, "update", store)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NO_V_ADAPTER, HALF_ADAPTER = adapter_scale(0.0, "1.self_attn.v_proj"), adapter_scale(0.5)
FULL = ["full_attention"] * 3
SLIDING = ["sliding_attention"] * 3
LINEAR = ("proj",)

FAULTS = [
    Fault("rope base 10000 -> 5000", "llama", 0, "rope", rope(rope_theta=5000.0)),
    Fault("rope base 10000 -> 1000000", "qwen2", 0, "rope", rope(rope_theta=1e6)),
    Fault("rope base 10000 -> 11000", "mistral", 0, "rope", rope(rope_theta=11000.0)),
    Fault("rope base 10000 -> 100000", "gemma2", 0, "rope", rope(rope_theta=1e5)),
    Fault("rope linear scaling", "llama", 0, "rope", rope(rope_type="linear", factor=2.0)),
    Fault("rope scaling of Llama 3", "llama", 0, "rope", rope(**LLAMA3)),
    Fault("yarn", "qwen3", 0, "rope", rope(**YARN)),
    Fault("yarn's attention factor", "qwen3_moe", 0, "rope", rope(**YARN, attention_factor=1.0)),
    Fault("local rope base", "gemma3_text", 0, "rope", rope("sliding_attention", rope_theta=20000.0)),
    Fault("global rope base", "gemma3_text", 2, "rope", rope("full_attention", rope_theta=10000.0)),
    Fault("norm eps 1e-6 -> 1e-5", "llama", 0, "input norm", option(rms_norm_eps=1e-5)),
    Fault("norm eps 1e-6 -> 1e-3", "qwen2", 0, "input norm", option(rms_norm_eps=1e-3)),
    Fault("norm eps 1e-6 -> 1e-3", "qwen3_moe", 0, "input norm", option(rms_norm_eps=1e-3)),
    Fault("eps of one norm", "mistral", 2, "norm before the MLP", edit=at("2", wide_eps)),
    Fault("norm weight without + 1", "gemma2", 0, "input norm", edit=in_every_layer(without_one)),
    Fault("q norm dropped", "qwen3", 0, "q norm", edit=without_norm("q_norm")),
    Fault("k norm dropped in layer 1", "qwen3", 1, "k norm", edit=without_norm("k_norm", 1)),
    Fault("q norm dropped", "qwen3_moe", 0, "q norm", edit=without_norm("q_norm")),
    Fault("k norm dropped", "gemma3_text", 0, "k norm", edit=without_norm("k_norm")),
    Fault("stale q norm", "qwen3", 2, "q norm", edit=at("2.self_attn.q_norm", drift(0.5))),
    Fault("soft cap of attention dropped", "gemma2", 0, "attention", option(attn_logit_softcapping=None)),
    Fault("soft cap of attention 2 -> 3", "gemma2", 0, "attention", option(attn_logit_softcapping=3.0)),
    Fault("soft cap of logits dropped", "gemma2", None, "soft cap of the logits", option(final_logit_softcapping=None)),
    Fault("soft cap of logits 5 -> 30", "gemma2", None, "soft cap of the logits", option(final_logit_softcapping=30.0)),
    Fault("sliding window ignored", "gemma2", 0, "attention", option(layer_types=FULL)),
    Fault("sliding window one too long", "gemma2", 0, "attention", option(sliding_window=9)),
    Fault("sliding window in every layer", "gemma2", 1, "attention", option(layer_types=SLIDING)),
    Fault("sliding window ignored", "mistral", 0, "attention", option(sliding_window=None)),
    Fault("sliding window one too short", "mistral", 0, "attention", option(sliding_window=11)),
    Fault("attention scale", "gemma2", 0, "attention", option(query_pre_attn_scalar=32)),
    Fault("attention scale of one layer", "llama", 1, "attention", edit=at("1.self_attn", attribute(scaling=0.2))),
    Fault("router top-k 2 -> 1", "qwen3_moe", 1, "choice of experts", option(num_experts_per_tok=1)),
    Fault("router top-k 2 -> 3", "qwen3_moe", 1, "choice of experts", option(num_experts_per_tok=3)),
    Fault("router without normalisation", "qwen3_moe", 1, "choice of experts", option(norm_topk_prob=False)),
    Fault("stale router", "qwen3_moe", 2, "router", edit=at("2.mlp.gate", drift(0.2))),
    Fault("router in float8", "qwen3_moe", 1, "router", edit=at("1.mlp.gate", in_float8)),
    Fault("two experts exchanged", "qwen3_moe", 2, "experts", edit=at("2.mlp.experts", swapped_experts)),
    Fault("experts' gate and up exchanged", "qwen3_moe", 1, "experts", edit=at("1.mlp.experts", swapped_halves)),
    Fault("experts of one layer stale", "qwen3_moe", 2, "experts", edit=at("2.mlp.experts", drift(0.1))),
    Fault("q weights of layer 2", "llama", 2, "q projection", edit=at("2.self_attn.q_proj", drift(0.05))),
    Fault("k weights of layer 1", "qwen2", 1, "k projection", edit=at("1.self_attn.k_proj", drift(0.05))),
    Fault("v weights of layer 1", "qwen3", 1, "v projection", edit=at("1.self_attn.v_proj", drift(0.05))),
    Fault("output weights of layer 0", "gemma2", 0, "output projection", edit=at("0.self_attn.o_proj", drift(0.05))),
    Fault("output weights in float8", "mistral", 2, "output projection", edit=at("2.self_attn.o_proj", in_float8)),
    Fault("up weights of layer 2", "gemma3_text", 2, "up projection", edit=at("2.mlp.up_proj", drift(0.05))),
    Fault("down weights of layer 0", "qwen2", 0, "down projection", edit=at("0.mlp.down_proj", drift(0.05))),
    Fault("key heads exchanged", "mistral", 1, "k projection", edit=at("1.self_attn.k_proj", swapped_heads)),
    Fault("stale layer", "llama", 1, "input norm", edit=at("1", drift(0.1))),
    Fault("stale projections of a layer", "qwen3", 2, "q projection", edit=at("2", drift(0.05, *LINEAR))),
    Fault("stale MLP of a layer", "gemma2", 1, "gate projection", edit=at("1.mlp", drift(0.05))),
    Fault("two layers exchanged", "qwen2", 1, "input norm", edit=lambda model: exchanged("1", "2")(model.model.layers)),
    Fault("stale norm after attention", "gemma3_text", 1, "norm after attention", edit=at("1.post_attention_layernorm", drift(0.3))),
    Fault("norm after the MLP dropped", "gemma2", 2, "norm after the MLP", edit=at("2", without_last_norm)),
    Fault("adapter scale 2 -> 1", "llama", 0, "adapter of the q projection", edit=adapter_scale(1.0), adapter=("q_proj", "v_proj")),
    Fault("adapter missing in layer 1", "qwen3", 1, "adapter of the v projection", edit=NO_V_ADAPTER, adapter=("q_proj", "v_proj")),
    Fault("adapter's alpha and rank exchanged", "gemma2", 0, "adapter of the down projection", edit=HALF_ADAPTER, adapter=("down_proj",)),
    Fault("KV cache in float8", "llama", 0, "KV cache", running=rounded_cache(torch.float8_e4m3fn)),
    Fault("KV cache in float8 e5m2", "gemma3_text", 0, "KV cache", running=rounded_cache(torch.float8_e5m2)),
    Fault("keys of layer 2 in float8", "qwen2", 2, "KV cache", running=rounded_cache(torch.float8_e4m3fn, values=False, layer=2)),
    Fault("values in float8", "qwen3_moe", 0, "KV cache", running=rounded_cache(torch.float8_e4m3fn, keys=False)),
    Fault("KV cache in int8", "qwen3", 0, "KV cache", running=rounded_cache(None)),
    Fault("gate and up exchanged", "llama", 0, "gate projection", edit=in_every_layer(swapped_projections)),
    Fault("gate and up exchanged in layer 1", "qwen2", 1, "gate projection", edit=at("1", swapped_projections)),
    Fault("gelu for silu", "llama", 0, "activation", option(hidden_act="gelu")),
    Fault("exact gelu for tanh in layer 1", "gemma2", 1, "activation", edit=at("1.mlp", replaced("act_fn", lambda: ACT2FN["gelu"]))),
    Fault("q bias missing", "qwen2", 0, "q projection", edit=in_every_layer(lambda layer: without_bias(layer.self_attn.q_proj))),
    Fault("output bias missing", "llama", 0, "output projection", edit=in_every_layer(lambda layer: without_bias(layer.self_attn.o_proj))),
    Fault("down bias of layer 1 missing", "llama", 1, "down projection", edit=at("1.mlp.down_proj", without_bias)),
    Fault("head not tied", "qwen2", None, "head", edit=untied),
    Fault("stale head", "llama", None, "head", edit=lambda model: drift(0.05)(model.lm_head)),
    Fault("rows of the embedding", "mistral", None, "embedding", edit=wrong_rows),
    Fault("embedding scale missing", "gemma3_text", None, "embedding", edit=unscaled),
    Fault("stale final norm", "qwen3", None, "final norm", edit=lambda model: drift(0.2)(model.model.norm)),
    Fault("residual of the norm", "llama", 1, "residual after attention", edit=at("1", residual_of_the_norm)),
]  # fmt: skip
