"""Variants of the model that an engine may compute instead, each scored on the sampled tokens.

They are enumerated from the model's own modules: rotary positions, heads and layout of attention,
MLP, norms, experts, skipped layers, quantised weights. Every variant is a change in place that is
taken back. All are screened on few tokens; the one that fits best is scored on all of them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from consistency.case import TIE_RATIO
from consistency.score import Scorer, score_logprobs
from consistency.tokens import Floats, Sequences
from consistency.transforms import Prediction, mean_square, select_rows, spread_rows

TOKENS_TO_SCREEN = 256
LEAST_GAIN = 1.5  # of squares, below which the best variant is not scored on all tokens
BASES = (1e3, 2.5e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2.5e5, 5e5, 1e6, 2e6, 5e6, 1e7, 1e8)
TABLE_SIZES = (0.5, 0.7, 1.4, 2.0)
FACTORS = (0.25, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0)
REFINEMENTS, POINTS = 3, 5  # of a scanned number
EPSILONS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
MOST_LAYERS = 48  # beyond it, only the first and the last are skipped

Hook = Callable[..., Any]


@dataclass
class Variant:
    """A change: new values of tensors, attributes, and hooks on the outputs of modules."""

    cause: str
    name: str
    values: list[tuple[Tensor, Callable[[Tensor], Tensor]]] = field(default_factory=list)
    attributes: list[tuple[Any, str, Any]] = field(default_factory=list)
    hooks: list[tuple[nn.Module, Hook]] = field(default_factory=list)
    scan: "Scan | None" = None  # the numbers of which it is one, which can be refined
    number: float = 0.0

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the change, and take it back at the end."""
        with ExitStack() as undo:
            for tensor, change in self.values:
                undo.callback(setattr, tensor, "data", tensor.data)
                tensor.data = change(tensor.data)
            for owner, name, value in self.attributes:
                undo.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
            for module, hook in self.hooks:
                undo.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            yield

    @property
    def is_empty(self) -> bool:
        return not (self.values or self.attributes or self.hooks)


Scan = tuple[Callable[[float], Variant], tuple[float, ...], float]  # maker, grid, the model's number


def scanned(make: Callable[[float], Variant], grid: tuple[float, ...], own: float) -> Iterator[Variant]:
    """Yield variants that differ in one number."""
    scan = (make, grid, own)
    yield from (replace(make(number), scan=scan, number=number) for number in grid)


def variant_alternatives(scorer: Scorer, rows: Sequences, temperature: float) -> list[Prediction]:
    """Score with the variant that fits the engine's logprobs best; none if none does."""
    return best_of(scorer, rows, temperature, list(variants_of(scorer.model)))


def best_of(scorer: Scorer, rows: Sequences, temperature: float, variants: list[Variant]) -> list[Prediction]:
    screened = select_rows(rows, spread_rows(rows, TOKENS_TO_SCREEN))
    engine = screened.engine_logprobs[screened.scored]
    usable = np.isfinite(engine)

    def miss(variant: Variant) -> float:
        predicted = scored_with(variant, scorer, screened, temperature)
        return mean_square(engine[usable], np.nan_to_num(predicted[usable], neginf=-1e9))

    as_is = miss(Variant("", ""))
    every = [variant for variant in variants if not variant.is_empty]
    misses = [miss(variant) for variant in every]
    if not misses:
        return []
    least = min(misses)
    # Of variants that do the same to this model, the first.
    chosen = next(one for one, left in zip(every, misses, strict=True) if left <= least * TIE_RATIO)
    # A number near the model's own may fit where none of a coarse grid does.
    near = [scan for scan in dict.fromkeys(one.scan for one in every) if scan is not None]
    for scan in near if least * LEAST_GAIN > as_is else () if chosen.scan is None else [chosen.scan]:
        least, chosen = refine(miss, least, chosen, scan)
    if least * LEAST_GAIN > as_is:
        return []
    return [Prediction(chosen.cause, chosen.name, 0.0, scored_with(chosen, scorer, rows, temperature))]


def scored_with(variant: Variant, scorer: Scorer, rows: Sequences, temperature: float) -> Floats:
    with variant.applied():
        return score_logprobs(scorer, rows, temperature=temperature)


def variants_of(model: Any) -> Iterator[Variant]:
    """Yield every variant that this model has."""
    yield from head_variants(model)
    yield from rotary_variants(model)
    yield from attention_variants(model)
    yield from mlp_variants(model)
    yield from norm_variants(model)
    yield from layer_variants(model)
    yield from expert_variants(model)
    yield from (quantized_variant(model, name) for name in SCHEMES)


# Rotary positions.


def rotary_variants(model: Any) -> Iterator[Variant]:
    own = rotary_base(model)
    if own is not None:
        yield from scanned(partial(based, model), BASES, own)
        yield from (scaled(model, factor) for factor in FACTORS)
    tables = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    yield from scanned(partial(larger_table, tables), TABLE_SIZES, 1.0)
    for name, change in TABLES.items():
        yield Variant("R49", name, hooks=[(table, partial(changed_table, change)) for table in tables])
    for name, order in (
        ("rotary pairs side by side", side_by_side),
        ("rotary pairs half a head apart", apart),
    ):
        yield Variant("R49", name, list(rows_of_heads(model, ("q_proj", "k_proj"), within(order))))


TABLES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "a rotary table of zeros": lambda cos, sin: (torch.zeros_like(cos), torch.zeros_like(sin)),
    "no rotary positions": lambda cos, sin: (torch.ones_like(cos), torch.zeros_like(sin)),
    "rotary positions in the other direction": lambda cos, sin: (cos, -sin),
    "a rotary table in bfloat16": lambda cos, sin: (cos.bfloat16().to(cos), sin.bfloat16().to(sin)),
}


def larger_table(tables: list[nn.Module], factor: float) -> Variant:
    """Return the model whose cosines and sines are multiplied by a number, as YaRN does."""
    hooks = [
        (table, partial(changed_table, lambda cos, sin: (factor * cos, factor * sin))) for table in tables
    ]
    return Variant("R49", f"a rotary table times {factor:.3g} (attention_factor of YaRN)", hooks=list(hooks))


def changed_table(change: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, table: Any) -> Any:
    return change(*table)


def side_by_side(size: int) -> Tensor:
    """Return the order of a head's rows whose pairs (2i, 2i + 1) are rotated."""
    return torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])


def apart(size: int) -> Tensor:
    """Return the inverse order: that of a checkpoint that was converted once too often."""
    return side_by_side(size).argsort()


def frequencies(model: Any) -> list[Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]


def rotary_base(model: Any) -> float | None:
    found = [buffer for buffer in frequencies(model) if buffer.numel() > 1]
    if not found or not 0 < float(found[0][1]) < 1:
        return None
    return float(found[0][1].double() ** -len(found[0]))


def based(model: Any, base: float) -> Variant:
    """Return the model with another rotary base."""
    own = rotary_base(model)
    assert own is not None
    power = float(np.log(base) / np.log(own))

    def change(old: Tensor) -> Tensor:
        return (old.double() ** power).to(old.dtype)

    name = f"rotary base {base:.3g} (the model's base is {own:.3g})"
    return Variant("R49", name, [(buffer, change) for buffer in frequencies(model)])


def scaled(model: Any, factor: float) -> Variant:
    """Return the model whose positions are divided by a factor."""
    values = [(buffer, lambda old: old / factor) for buffer in frequencies(model)]
    return Variant("R49", f"positions divided by {factor:g}", list(values))


def refine(
    miss: Callable[[Variant], float], least: float, chosen: Variant, scan: Scan
) -> tuple[float, Variant]:
    """Search a number between the neighbours of the best one, or of the model's own."""
    make, numbers, own = scan
    at = chosen.number if chosen.scan is scan else own
    grid = sorted({*numbers, own})
    low, high = grid[max(grid.index(at) - 1, 0)], grid[min(grid.index(at) + 1, len(grid) - 1)]
    for _ in range(REFINEMENTS):
        for number in np.geomspace(low, high, POINTS + 2).tolist():
            variant = make(number)
            if (found := miss(variant)) < least:
                least, chosen, at = found, variant, number
        step = (high / low) ** (1 / (POINTS + 1))
        low, high = at / step, at * step
    return least, chosen


# Attention.

Order = Callable[[Tensor], Tensor]  # of heads [heads, size, ...]


def attentions(model: Any) -> list[Any]:
    """Return the attention modules with separate projections."""
    return [
        module
        for module in model.modules()
        if all(hasattr(module, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    ]


def head_size(model: Any, module: Any) -> int:
    config = model.config.get_text_config()
    return int(getattr(module, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rows_of_heads(
    model: Any, names: tuple[str, ...], order: Order
) -> Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """Yield changes of projections whose rows, seen as [heads, size, ...], get another order."""
    for module in attentions(model):
        size = head_size(model, module)
        for name in names:
            for parameter in getattr(module, name).parameters():
                if parameter.shape[0] % size == 0:
                    yield parameter, partial(in_heads, size, order)


def in_heads(size: int, order: Order, old: Tensor) -> Tensor:
    return order(old.reshape(-1, size, *old.shape[1:])).reshape(old.shape).contiguous()


def within(order: Callable[[int], Tensor]) -> Order:
    """Return the change of the rows inside every head."""
    return lambda heads: heads[:, order(heads.shape[1]).to(heads.device)]


def attention_variants(model: Any) -> Iterator[Variant]:
    config = model.config.get_text_config()
    num_heads = int(getattr(config, "num_attention_heads", 1))
    num_shared = int(getattr(config, "num_key_value_heads", None) or num_heads)
    orders: dict[str, Order] = {"in reverse order": lambda heads: heads.flip(0)}
    for by in (1, -1):
        orders[f"moved by {by:+d}"] = partial(torch.roll, shifts=by, dims=0)
    for name, order in orders.items() if num_shared > 1 else ():
        for names in (("k_proj", "v_proj"), ("k_proj",), ("v_proj",)):
            parts = " and ".join(part[0] for part in names)
            yield Variant(
                "R25.variant", f"the heads of {parts} {name}", list(rows_of_heads(model, names, order))
            )
    if 1 < num_shared < num_heads:
        yield shared_in_turn(model, num_heads, num_shared)
    yield Variant("R25.variant", "k and v exchanged", list(exchanged(model, "k_proj", "v_proj")))
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    for without in (*((name,) for name in projections), projections):
        biases = [getattr(module, name).bias for module in attentions(model) for name in without]
        known = [(bias, torch.zeros_like) for bias in biases if bias is not None]
        yield Variant("R25.variant", f"no bias of {', '.join(without)}", list(known))
    for name, scaling in (
        ("no scaling of attention scores", 1.0),
        ("attention scores divided by the head size", None),
    ):
        attributes = [
            (module, "scaling", 1 / head_size(model, module) if scaling is None else scaling)
            for module in attentions(model)
            if isinstance(getattr(module, "scaling", None), float)
        ]
        yield Variant("R54", name, attributes=list(attributes))
    capped = [one for one in attentions(model) if getattr(one, "attn_logit_softcapping", None)]
    yield Variant(
        "R54",
        "no soft cap of attention scores",
        attributes=[(one, "attn_logit_softcapping", None) for one in capped],
    )


def shared_in_turn(model: Any, num_heads: int, num_shared: int) -> Variant:
    """Return the model whose query head h reads key-value head h modulo their number."""
    group = num_heads // num_shared
    order = torch.tensor([(i % group) * num_shared + i // group for i in range(num_heads)])

    def in_turn(heads: Tensor) -> Tensor:
        return heads[order.to(heads.device)]

    def of_columns(size: int, old: Tensor) -> Tensor:
        return in_heads(size, in_turn, old.T).T.contiguous()

    values = list(rows_of_heads(model, ("q_proj",), in_turn))
    for module in attentions(model):
        values.append((module.o_proj.weight, partial(of_columns, head_size(model, module))))
    return Variant("R25.variant", "query heads that share keys and values in turn", values)


def exchanged(model: Any, one: str, other: str) -> Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """Yield changes that exchange two projections of the same shape."""
    for module in model.modules():
        if not (hasattr(module, one) and hasattr(module, other)):
            continue
        first, second = (getattr(getattr(module, name), "weight", None) for name in (one, other))
        if first is not None and second is not None and first.shape == second.shape:
            yield first, partial(instead, second.data)
            yield second, partial(instead, first.data)


def instead(new: Tensor, old: Tensor) -> Tensor:
    return new


# MLP and norms.


def mlp_variants(model: Any) -> Iterator[Variant]:
    yield Variant("R25.variant", "gate and up exchanged", list(exchanged(model, "gate_proj", "up_proj")))
    own = [module for module in model.modules() if isinstance(getattr(module, "act_fn", None), nn.Module)]
    for name, activation in ACTIVATIONS.items():
        attributes = [(module, "act_fn", activation) for module in own]
        yield Variant("R54", f"the activation {name}", attributes=list(attributes))


ACTIVATIONS: dict[str, nn.Module] = {
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "gelu by tanh": nn.GELU(approximate="tanh"),
    "relu": nn.ReLU(),
}


def norms(model: Any) -> dict[str, list[nn.Module]]:
    """Return the norms with a weight, by the last part of their names."""
    found: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Norm") and "weight" in dict(
            module.named_parameters(recurse=False)
        ):
            found.setdefault(name.rpartition(".")[2], []).append(module)
    return found


def norm_variants(model: Any) -> Iterator[Variant]:
    by_name = norms(model)
    every = [module for modules in by_name.values() for module in modules]
    for name, by in (("1 + weight", 1.0), ("weight - 1", -1.0)):
        values = [(module.get_parameter("weight"), partial(torch.add, other=by)) for module in every]
        yield Variant("R54", f"norms scaled by {name}", list(values))
    for epsilon in EPSILONS:
        attributes = [
            (module, name, epsilon)
            for module in every
            for name in ("variance_epsilon", "eps")
            if isinstance(vars(module).get(name), float)
        ]
        yield Variant("R54", f"norms with epsilon {epsilon:.0e}", attributes=list(attributes))
    for name, modules in by_name.items():
        yield Variant("R25.variant", f"{name} skipped", hooks=[(module, skip) for module in modules])


def skip(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Return a module's input in place of its output."""
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


# Embeddings, output layer, whole layers.


def head_variants(model: Any) -> Iterator[Variant]:
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    zeros: Hook = lambda module, args, kwargs, logits: torch.zeros_like(logits)  # noqa: E731
    yield Variant("R26.variant", "an output layer, or an embedding, of zeros", hooks=[(output, zeros)])
    if output.weight is not embedding.weight and output.weight.shape == embedding.weight.shape:
        values = [(output.weight, lambda old: embedding.weight.data)]
        yield Variant("R26.variant", "the embedding as output layer", list(values))
    scale = getattr(embedding, "embed_scale", None)
    if isinstance(scale, Tensor):
        yield Variant("R54", "embeddings without their scale", [(scale, torch.ones_like)])


def layer_variants(model: Any) -> Iterator[Variant]:
    layers = list(getattr(model.get_decoder(), "layers", ()))
    last = len(layers) - 1
    for number, layer in enumerate(layers) if last > 0 else ():
        if len(layers) <= MOST_LAYERS or number in (0, last):
            yield Variant("R25.variant", f"layer {number} skipped", hooks=[(layer, skip)])


# Experts.


def expert_variants(model: Any) -> Iterator[Variant]:
    choosing = [module for module in model.modules() if isinstance(getattr(module, "top_k", None), int)]
    for by in (1, -1):
        attributes = [(one, "top_k", one.top_k + by) for one in choosing if one.top_k + by > 0]
        yield Variant(
            "R54", f"{abs(by)} expert {'more' if by > 0 else 'less'} a token", attributes=list(attributes)
        )
    routers_of = [one for one in choosing if type(one).__name__.lower().endswith("topkrouter")]
    raw = "experts weighed by the router's logits, without a softmax"
    yield Variant("R54", raw, hooks=[(one, weighed_by_logits) for one in routers_of])
    for name in ("norm_topk_prob", "norm_topk"):
        owners = [one for one in model.modules() if isinstance(getattr(one, name, None), bool)]
        attributes = [(one, name, not getattr(one, name)) for one in owners]
        yield Variant("R54", "weights of experts normalised the other way", attributes=list(attributes))
    routers = [
        parameter
        for name, parameter in model.named_parameters()
        if name.endswith(("gate.weight", "router.weight")) and parameter.dim() == 2
    ]
    for by in (1, -1):
        values = [(router, partial(torch.roll, shifts=by, dims=0)) for router in routers]
        yield Variant("R25.variant", f"experts moved by {by:+d}", list(values))
    shared = [
        module for name, module in model.named_modules() if name.endswith(("shared_expert", "shared_experts"))
    ]
    yield Variant(
        "R25.variant",
        "the shared expert skipped",
        hooks=[(module, lambda module, args, kwargs, output: torch.zeros_like(output)) for module in shared],
    )


def weighed_by_logits(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    logits, _, chosen = output
    return logits, logits.gather(-1, chosen), chosen


# Quantised weights.


def quantized_variant(model: Any, name: str) -> Variant:
    """Return the model whose linear layers, but for the output layer, hold quantised weights."""
    linear = [module.weight for module in model.base_model.modules() if isinstance(module, nn.Linear)]
    scheme = SCHEMES[name]
    return Variant(
        "R44",
        f"weights in {name}",
        [(weight, lambda old: scheme(old.float()).to(old.dtype)) for weight in linear],
    )


def rounded_to_float8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def rounded_to_integers(weight: Tensor, bits: int, group: int | None) -> Tensor:
    groups = weight if group is None or weight.shape[1] % group else weight.reshape(-1, group)
    most = 2 ** (bits - 1) - 1
    scale = groups.abs().amax(1, keepdim=True).clamp(min=1e-12) / most
    return ((groups / scale).round().clamp(-most - 1, most) * scale).reshape(weight.shape)


SCHEMES: dict[str, Callable[[Tensor], Tensor]] = {
    "float8": rounded_to_float8,
    "int8": partial(rounded_to_integers, bits=8, group=None),
    "int4": partial(rounded_to_integers, bits=4, group=128),
}
