"""The operators of a decoder whose results are compared, in the order of their computation."""

import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, total_ordering
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from areal_core.engine.vision_models import text_model, vision_family

OPERATORS = tomllib.loads((Path(__file__).parent / "operators.toml").read_text(encoding="utf-8"))
BEFORE: dict[str, str] = OPERATORS["before"]
LABELS: dict[str, str] = BEFORE | OPERATORS["in_layer"] | OPERATORS["after"]
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


LAYER_MODULE = re.compile(r"layers\.(\d+)(?:\.(.+))?")
MLP = r"(?:mlp|block_sparse_moe|feed_forward)"
OUTPUTS = {pattern.replace("MLP", MLP): result for pattern, result in OPERATORS["outputs"].items()}
ROUTER = re.compile(rf"{MLP}\.(?:gate|router)")
# Takes the result of a site [tokens, width]; returns it, or another to continue with.
Exchange = Callable[[Site, Tensor], Tensor]


@dataclass
class Taps:
    """The sites of a model during a forward pass of the tokens from `start` to `end` of a row."""

    exchange: Exchange
    start: int = 0
    end: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the forward pass."""
        return self.end - self.start

    def flat(self, site: Site, value: Tensor) -> Tensor:
        """Exchange a value whose first dimensions are the tokens, in its own shape."""
        rows = value.shape[-2] if site.result in ("head", "logits") else self.num_tokens
        given = value.reshape(rows, -1)
        taken = self.exchange(site, given)
        return value if taken is given else taken.reshape(value.shape).to(value.dtype)

    def heads(self, site: Site, value: Tensor) -> Tensor:
        """Exchange a value [1, heads, tokens, head_dim]."""
        return self.flat(site, value.transpose(1, 2)).transpose(1, 2)

    def normed_heads(self, site: Site) -> Callable[..., Any]:
        """Return a hook for a norm of heads: before it some classes transpose, some do not."""

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            is_first = output.shape[1] == self.num_tokens and output.is_contiguous()
            return self.flat(site, output) if is_first or output.dim() < 4 else self.heads(site, output)

        return hook

    def after(self, site: Site) -> Callable[..., Any]:
        """Return a hook that exchanges a module's output; of a tuple, the first item."""

        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return self.flat(site, output[0]), *output[1:]
            return self.flat(site, output)

        return hook

    def before(self, site: Site) -> Callable[..., Any]:
        """Return a hook that exchanges a module's first argument."""

        def hook(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            if inputs:
                return (self.flat(site, inputs[0]), *inputs[1:]), keywords
            name, value = next(iter(keywords.items()))
            return inputs, keywords | {name: self.flat(site, value)}

        return hook

    def routing(self, site: Site, num_experts: int) -> Callable[..., Any]:
        """Return a hook that exchanges the routing weights among the arguments of the experts."""

        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
            hidden, chosen, weights, *rest = inputs
            given = dense_routing(chosen, weights, num_experts)
            taken = self.exchange(site, given)
            if taken is given:
                return None
            width = max(1, int((taken != 0).sum(-1).max()))
            weights, chosen = taken.to(weights.dtype).topk(width, dim=-1)
            return hidden, chosen, weights, *rest

        return hook


def dense_routing(chosen: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """Return routing weights [tokens, experts], 0 for experts that are not chosen."""
    dense = torch.zeros(len(chosen), num_experts, dtype=weights.dtype)
    return dense.scatter_(1, chosen.long(), weights)


@contextmanager
def tapped(model: Any, exchange: Exchange) -> Iterator[Taps]:
    """Pass the result of every site to `exchange` in the body; one row at a time."""
    taps = Taps(exchange)
    handles = list(hook_modules(model, taps))
    layers = {id(module): module for module in model.get_decoder().modules()}
    found = ALL_ATTENTION_FUNCTIONS.get_interface

    def get_interface(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        compute = found(name, default)

        def attend(module: Any, query: Tensor, *arguments: Any, **keywords: Any) -> Any:
            if id(module) not in layers:
                return compute(module, query, *arguments, **keywords)
            query = taps.heads(Site("rope_q", module.layer_idx), query)
            output, scores = compute(module, query, *arguments, **keywords)
            return taps.flat(Site("attention", module.layer_idx), output), scores

        return attend

    update = Cache.update

    def store(cache: Cache, key: Tensor, value: Tensor, layer_idx: int, *rest: Any, **options: Any) -> Any:
        key = taps.heads(Site("rope_k", layer_idx), key)
        keys, values = update(cache, key, value, layer_idx, *rest, **options)
        return with_new(taps, Site("cache_k", layer_idx), keys), with_new(
            taps, Site("cache_v", layer_idx), values
        )

    try:
        with (
            patch.object(ALL_ATTENTION_FUNCTIONS, "get_interface", get_interface),
            patch.object(Cache, "update", store),
        ):
            yield taps
    finally:
        for handle in handles:
            handle.remove()


def with_new(taps: Taps, site: Site, cached: Tensor) -> Tensor:
    """Exchange the newest tokens of a cache [1, heads, tokens, head_dim]."""
    old, new = cached.split([cached.shape[2] - taps.num_tokens, taps.num_tokens], dim=2)
    return torch.cat([old, taps.heads(site, new)], dim=2)


def hook_modules(model: Any, taps: Taps) -> Iterator[Any]:
    decoder = model.get_decoder()
    yield model.get_input_embeddings().register_forward_hook(taps.after(Site("embedding")))
    yield from hook_images(model, taps)
    yield decoder.norm.register_forward_hook(taps.after(Site("final_norm")))
    yield model.get_output_embeddings().register_forward_hook(taps.after(Site("head")))
    yield model.register_forward_hook(logits_hook(taps))
    modules = dict(decoder.named_modules())
    for name, module in modules.items():
        match = LAYER_MODULE.fullmatch(name)
        if match is None:
            continue
        layer, leaf = int(match[1]), match[2]
        if leaf is None:
            yield from hook_norms(module, layer, taps)
            yield module.register_forward_hook(taps.after(Site("residual", layer)))
        elif ROUTER.fullmatch(leaf):
            yield module.register_forward_hook(taps.after(Site("router", layer)))
            experts = modules.get(f"{name.rpartition('.')[0]}.experts")
            if experts is not None:
                routed = taps.routing(Site("routing", layer), module.weight.shape[0])
                yield experts.register_forward_pre_hook(routed)
        else:
            yield from hook_leaf(module, leaf, layer, taps)


def hook_images(model: Any, taps: Taps) -> Iterator[Any]:
    family = vision_family(model)
    if family is None:
        return

    def pixels(module: nn.Module, inputs: Any, options: dict[str, Any]) -> Any:
        found: Tensor | None = options.get("pixel_values")
        if found is None:
            return None
        is_image = options[family.types_option][0] == 1
        width = found.numel() // int(is_image.sum())
        given = found.new_zeros(taps.num_tokens, width)
        given[is_image] = found.reshape(-1, width)
        taken = taps.exchange(Site("pixels"), given)[is_image].reshape(found.shape)
        return inputs, options | {"pixel_values": taken.to(found.dtype)}

    def merged(module: nn.Module, inputs: Any, options: dict[str, Any]) -> Any:
        return inputs, options | {"inputs_embeds": taps.flat(Site("images"), options["inputs_embeds"])}

    yield model.register_forward_pre_hook(pixels, with_kwargs=True)
    yield text_model(model).register_forward_pre_hook(merged, with_kwargs=True)


def hook_leaf(module: nn.Module, leaf: str, layer: int, taps: Taps) -> Iterator[Any]:
    """Yield the handles of hooks on a module of `OUTPUTS`, also inside an adapter's wrapper."""
    own = leaf.removesuffix(".base_layer")
    for pattern, result in OUTPUTS.items():
        match = re.fullmatch(pattern, own)
        if match is None:
            continue
        result = result.format(*match.groups())
        if result == "down" and own == leaf:
            yield module.register_forward_pre_hook(taps.before(Site("gated", layer)), with_kwargs=True)
        site = Site(f"{result}_adapter" if hasattr(module, "base_layer") else result, layer)
        hook = taps.normed_heads(site) if result in ("q_norm", "k_norm") else taps.after(site)
        yield module.register_forward_hook(hook)


def hook_norms(layer: nn.Module, index: int, taps: Taps) -> Iterator[Any]:
    """Yield the handles of hooks on the norms between attention and MLP, whose names vary.

    Llama's `post_attention_layernorm` is before the MLP, Gemma's after attention.
    """
    names = dict(layer.named_children())
    after_attention = names.get("post_attention_layernorm")
    before_mlp = names.get("pre_feedforward_layernorm")
    if before_mlp is None and "post_feedforward_layernorm" not in names:
        before_mlp, after_attention = after_attention, None
    if after_attention is not None:
        yield after_attention.register_forward_hook(taps.after(Site("post_attention_norm", index)))
    mlp = before_mlp or next((module for name, module in names.items() if re.fullmatch(MLP, name)), None)
    if mlp is not None:
        residual = taps.before(Site("attention_residual", index))
        yield mlp.register_forward_pre_hook(residual, with_kwargs=True)
    if before_mlp is not None:
        yield before_mlp.register_forward_hook(taps.after(Site("mlp_norm", index)))


def logits_hook(taps: Taps) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        taps.flat(Site("logits"), output.logits)

    return hook
