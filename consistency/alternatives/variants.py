"""Variants of the model that an engine may compute instead, each scored on the sampled tokens.

They are enumerated from the model's own modules: rotary positions, heads and layout of attention,
MLP, norms, experts, skipped layers, quantised weights. Every variant is a change in place that is
taken back. They are screened on few tokens, further members of a family only where one of the first two
moves the logprobs as the engine's differ; the one that fits best is scored on all tokens.
"""

import copy
import itertools
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from consistency.case import TIE_RATIO
from consistency.measure import correlation
from consistency.score import Scorer, score_logprobs
from consistency.tensors import (
    LAYER,
    MOST_TENSORS,
    VOCABULARY_WORDS,
    tensors_of,
    vision_tensors,
    with_values,
)
from consistency.tokens import Floats, Sequences
from consistency.transforms import RESIDUAL_BOUND, Prediction, mean_square, select_rows, spread_rows

TOKENS_TO_SCREEN = 256
LEAST_GAIN = 1.5  # of squares, below which the best variant is not scored on all tokens
# Correlation with D of one of a family's first two members. A variant that explains a third of the squares has 0.58,
# chance leaves 0.06 in 256 tokens.
ALIGNED = 0.2
BASES = (1e3, 2.5e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2.5e5, 5e5, 1e6, 2e6, 5e6, 1e7, 1e8)
FACTORS = (0.25, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0)
MULTIPLES = (0.25, 0.5, 2.0, 4.0)  # of a number of the model
REFINEMENTS, POINTS = 3, 5  # of a scanned number
MOST_REFINED = 4  # scans, the most aligned ones, where none fits
MOST_LAYERS = 48  # beyond it, only the first and the last are skipped
WINDOW, WIDEST = "sliding_window", 1 << 30  # tokens
WINDOWS = tuple(2.0**k for k in range(3, 18))
OPTIONAL_OF_ROPE = ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
ROTATE = "apply_rotary_pos_emb"  # of the modules of Transformers
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

Hook = Callable[..., Any]


@dataclass
class Variant:
    """A change: new values of tensors, attributes, and hooks on the outputs of modules.

    Those of one `family` move the logprobs the same way, or the other way; the first two do either.
    """

    cause: str
    name: str
    values: list[tuple[Tensor, Callable[[Tensor], Tensor]]] = field(default_factory=list)
    attributes: list[tuple[Any, str, Any]] = field(default_factory=list)
    hooks: list[tuple[nn.Module, Hook]] = field(default_factory=list)
    number: float = 0.0
    family: str = ""
    scan: "Scan | None" = None  # whose numbers can be refined

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the change, and take it back at the end."""
        with ExitStack() as undo:
            undo.enter_context(with_values([(tensor, change(tensor.data)) for tensor, change in self.values]))
            for owner, name, value in self.attributes:
                undo.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
            for module, hook in self.hooks:
                undo.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            yield


Scan = tuple[Callable[[float], Variant], tuple[float, ...], float]  # maker, grid, the model's number


def scanned(make: Callable[[float], Variant], grid: tuple[float, ...], own: float) -> Iterator[Variant]:
    """Yield variants that differ in one number, the nearest to the model's own first."""
    scan = (make, grid, own)
    for number in sorted(grid, key=lambda number: abs(np.log(number / own))):
        yield replace(make(number), number=number, scan=scan)


def variant_alternatives(scorer: Scorer, rows: Sequences, temperature: float) -> list[Prediction]:
    """Score with the variant that fits the engine's logprobs best; none if none does."""
    longest = int(np.diff(rows.cu_seqlens).max())  # a wider window changes nothing
    some = [one for one in variants_of(scorer.model) if one.cause != "R52" or one.number < longest]
    return best_of(scorer, rows, temperature, some)


def best_of(scorer: Scorer, rows: Sequences, temperature: float, variants: list[Variant]) -> list[Prediction]:
    screened = select_rows(rows, spread_rows(rows, TOKENS_TO_SCREEN))
    engine = screened.engine_logprobs[screened.scored]
    base = score_logprobs(scorer, screened, temperature=temperature)
    difference, as_is = signed(engine - base), missed(screened, base)
    shared: dict[Scan | str | None, list[float]] = {}  # correlation with D of the members of a family or scan

    def miss(variant: Variant) -> float:
        before = shared.setdefault(variant.family or variant.scan, [])
        if variant.family and len(before) > 1 and max(before) < ALIGNED:
            return float("inf")
        try:
            predicted = scored_with(variant, scorer, screened, temperature)
        except (AttributeError, RuntimeError, TypeError, ValueError):  # which this class does not compute
            return float("inf")
        before.append(abs(correlation(signed(predicted - base), difference)))
        return missed(screened, predicted)

    tried = [one for one in variants if one.values or one.attributes or one.hooks]
    misses = [miss(variant) for variant in tried]
    if not misses:
        return []
    least = min(misses)
    # Of variants that do the same to this model, the first.
    chosen = next(one for one, left in zip(tried, misses, strict=True) if left <= least * TIE_RATIO)
    # A number near the model's own may fit where none of a coarse grid does.
    aligned = {one.scan: max(shared[one.family or one.scan], default=0.0) for one in tried if one.scan}
    near = sorted((one for one in aligned if aligned[one] > ALIGNED), key=lambda one: -aligned[one])
    for scan in near[:MOST_REFINED] if least * LEAST_GAIN > as_is else [chosen.scan]:
        if scan is not None:
            least, chosen = refine(miss, least, chosen, scan)
    if least * LEAST_GAIN > as_is:
        return []
    return [Prediction(chosen.cause, chosen.name, 0.0, scored_with(chosen, scorer, rows, temperature))]


def signed(difference: Floats) -> Floats:
    """Differences, bounded; unusable ones count as 0."""
    return np.clip(np.nan_to_num(difference, posinf=0, neginf=0), -RESIDUAL_BOUND, RESIDUAL_BOUND)


def scored_with(variant: Variant, scorer: Scorer, rows: Sequences, temperature: float) -> Floats:
    with variant.applied():
        return score_logprobs(scorer, rows, temperature=temperature)


def missed(rows: Sequences, predicted: Floats) -> float:
    """Return the mean square by which the engine's usable logprobs miss a prediction."""
    engine = rows.engine_logprobs[rows.scored]
    usable = np.isfinite(engine)
    return mean_square(engine[usable], np.nan_to_num(predicted[usable], neginf=-1e9))


def variants_of(model: Any) -> Iterator[Variant]:
    """Yield every variant that this model has; an output layer of zeros first, which other zeros look like."""
    yield from head_variants(model)
    yield from rotary_variants(model)
    yield from attention_variants(model)
    yield from pair_variants(model)
    yield from option_variants(model)
    yield from norm_variants(model)
    yield from layer_variants(model)
    yield from kind_variants(model)
    yield from expert_variants(model)
    yield from quantized_variants(model)
    yield from changed_tensors(model)


# Rotary positions.


def rotary_variants(model: Any) -> Iterator[Variant]:
    tables = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    made = [table for table in tables if getattr(getattr(table, "config", None), "rope_parameters", None)]
    rope = made[0].config.rope_parameters if made else {}
    kinds = {f" of {key} layers": (key,) for key, value in rope.items() if isinstance(value, dict)}
    every = {"": tuple(key for (key,) in kinds.values())} if made else {}
    for of, keys in (kinds | every).items():
        if "rope_theta" in (own := rope[keys[0]] if keys else rope):
            yield from other_positions(partial(rebuilt, made, keys), of, own)
    if made:
        whole = rebuilt(made, every[""], "rotary positions of the whole head", partial_rotary_factor=1.0)
        parts = [one for one in model.modules() if hasattr(one, "rotary_ndims")]
        whole.attributes += [(one, "rotary_ndims", head_size(model)) for one in parts]
        yield whole
    for name, change in TABLES.items():
        yield Variant("R49", name, hooks=[(table, partial(changed_table, change)) for table in tables])
    values = [(one, lambda old: old.bfloat16().to(old)) for table in tables for one in table.buffers()]
    yield Variant("R49", "rotary frequencies in bfloat16", list(values))
    for name, sizes in (("side by side", (-1, 2)), ("half a head apart", (2, -1))):
        order = partial(regrouped, *sizes, dim=1)
        yield Variant("R49", f"rotary pairs {name}", rows_of_heads(model, ("q_proj", "k_proj"), order))


def other_positions(make: Callable[..., Variant], of: str, own: dict[str, Any]) -> Iterator[Variant]:
    """Yield tables of other rope parameters: base, type and each number of the scaling."""
    base = own["rope_theta"]

    def based(number: float) -> Variant:
        return make(f"rotary base {number:.3g}{of} (the model's base is {base:.3g})", rope_theta=number)

    yield from scanned(based, BASES, base)
    for factor in FACTORS:
        yield make(f"positions{of} divided by {factor:g}", rope_type="linear", factor=factor)
    yield make(f"rotary positions{of} without the scaling of the config", rope_type="default")
    for name in (name for name in own if name in OPTIONAL_OF_ROPE):
        yield make(f"rotary scaling{of} without the {name} of the config", **{name: None})
    for name, other in (("short_factor", "long_factor"), ("long_factor", "short_factor")):
        if other in own:
            yield make(
                f"the {other} of the rotary scaling{of} for rows of every length", **{name: own[other]}
            )
    for name, number in own.items():
        if type(number) in (int, float) and name not in ("rope_theta", "partial_rotary_factor"):
            yield from scanned(partial(rescaled, make, of, name, number), MULTIPLES, 1.0)


def rescaled(make: Callable[..., Variant], of: str, name: str, number: float, by: float) -> Variant:
    return make(f"{name} of the rotary scaling{of} times {by:.3g}", **{name: number * by})


def rebuilt(tables: list[Any], keys: tuple[str, ...], title: str, **parameters: Any) -> Variant:
    """Return the model whose tables of frequencies are made from other rope parameters."""
    found = Variant("R49", title)
    for table in tables:
        config = copy.deepcopy(table.config)
        for rope in [config.rope_parameters[key] for key in keys] or [config.rope_parameters]:
            rope.update(parameters)
        try:
            new = type(table)(config)
        except (KeyError, RuntimeError, TypeError, ValueError):  # a scaling that lacks a number
            return Variant("R49", title)
        found.values += [
            (old, partial(replaced, new.get_buffer(n).to(old))) for n, old in table.named_buffers()
        ]
        given = vars(new).items()
        found.attributes += [(table, n, v) for n, v in given if n.endswith(("attention_scaling", "config"))]
    return found


TABLES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "a rotary table of zeros": lambda cos, sin: (torch.zeros_like(cos), torch.zeros_like(sin)),
    "no rotary positions": lambda cos, sin: (torch.ones_like(cos), torch.zeros_like(sin)),
    "rotary positions in the other direction": lambda cos, sin: (cos, -sin),
}


def changed_table(change: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, table: Any) -> Any:
    return change(*table)


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
            if (found := miss(variant)) * TIE_RATIO < least:
                least, chosen, at = found, variant, number
        step = (high / low) ** (1 / (POINTS + 1))
        low, high = at / step, at * step
    return least, chosen


# Attention.

Order = Callable[[Tensor], Tensor]  # of heads [heads, size, ...]
Changes = list[tuple[Tensor, Callable[[Tensor], Tensor]]]  # of values of tensors


def head_size(model: Any) -> int:
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // getattr(config, "num_attention_heads", 1))


def rows_of_heads(model: Any, names: tuple[str, ...], order: Order) -> Changes:
    """Return changes of projections whose rows, seen as [heads, size, ...], get another order."""
    of_heads = partial(in_heads, head_size(model), order)
    return [change for name in names for change in reordered(model, (name,), of_heads)]


def in_heads(size: int, order: Order, old: Tensor) -> Tensor:
    if len(old) % size:
        return old
    return order(old.reshape(-1, size, *old.shape[1:])).reshape(old.shape).contiguous()


def attention_variants(model: Any) -> Iterator[Variant]:
    config = model.config.get_text_config()
    num_heads = int(getattr(config, "num_attention_heads", 1))
    num_shared = int(getattr(config, "num_key_value_heads", None) or num_heads)
    orders: dict[str, Order] = {"in reverse order": lambda heads: heads.flip(0)}
    orders |= {f"moved by {by:+d}": partial(torch.roll, shifts=by, dims=0) for by in (1, -1)}
    for name, order in orders.items() if num_shared > 1 else ():
        for names in (("k_proj", "v_proj"), ("k_proj",), ("v_proj",)):
            parts = " and ".join(part[0] for part in names)
            yield Variant("R25.variant", f"the heads of {parts} {name}", rows_of_heads(model, names, order))
    grouped = partial(by_groups, num_heads, num_shared)
    cut: Order = lambda rows: rows[grouped(torch.arange(len(rows))).argsort()]  # noqa: E731
    for how, order in (("joined in groups of heads, then cut", grouped), ("joined, then cut by groups", cut)):
        values = [change for names in ATTENDED for change in reordered(model, names, order)]
        yield Variant("R25.variant", f"q, k and v {how}", values)


def by_groups(num_heads: int, num_shared: int, rows: Tensor) -> Tensor:
    """Order rows of q, k and v so that keys and values follow the query heads that share them."""
    size = len(rows) // (num_heads + 2 * num_shared)
    parts = rows.split([num_heads * size, num_shared * size, num_shared * size])
    return torch.cat([part.unflatten(0, (num_shared, -1)) for part in parts], 1).flatten(0, 1)


PAIRS = {"k and v": ("k_proj", "v_proj"), "gate and up": ("gate_proj", "up_proj")}
ATTENDED = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("query_key_value",))
FUSED = "gate_up_proj"  # a linear layer, or of experts [experts, gate and up, dim]
SHARDS = (2, 4, 8)
BY_COLUMNS = ("o_proj.weight", "down_proj.weight", "dense.weight", "dense_4h_to_h.weight", "fc2.weight")


def pair_variants(model: Any) -> Iterator[Variant]:
    """Yield projections that were exchanged, or joined and cut at the wrong places."""
    orders: dict[str, Order] = {"exchanged": lambda rows: rows.roll(len(rows) // 2, 0)}
    for count in SHARDS:
        orders[f"joined, then cut into {count} shards"] = partial(regrouped, count, 2)
        orders[f"joined in {count} shards, then cut once"] = partial(regrouped, 2, count)
    orders["joined row by row, then cut once"] = partial(regrouped, 2, -1)
    for pair, names in PAIRS.items():
        for how, order in orders.items():
            yield Variant("R25.variant", f"{pair} {how}", reordered(model, names, order))
    for count in SHARDS:
        every = ((name,) for name in (*ATTENDED[0], *PAIRS["gate and up"]))
        values = [change for names in every for change in reordered(model, names, partial(repeated, count))]
        name = f"q, k, v, gate and up with the rows of the first of {count} ranks on each"
        yield Variant("R25.variant", name, values)


def repeated(count: int, rows: Tensor) -> Tensor:
    return rows if len(rows) % count else torch.cat([rows.chunk(count)[0]] * count)


def regrouped(outer: int, inner: int, rows: Tensor, dim: int = 0) -> Tensor:
    """Exchange the order of the two groupings of rows [outer * inner * n, ...]; one may be -1."""
    count = rows.shape[dim]
    if count % abs(outer * inner):
        return rows
    groups = rows.unflatten(dim, (outer, inner, *([-1] if min(outer, inner) > 0 else [1])))
    return groups.transpose(dim, dim + 1).reshape(rows.shape)


def reordered(model: Any, names: tuple[str, ...], order: Order) -> Changes:
    """Return changes of projections whose rows, one after the other, get another order."""

    def part(joined: list[Tensor], place: int, old: Tensor) -> Tensor:
        return order(torch.cat(joined)).split([len(one) for one in joined])[place].contiguous()

    found: Changes = []
    for module, leaf in itertools.product(model.modules(), ("weight", "bias")):
        parts = [getattr(getattr(module, name, None), leaf, None) for name in names]
        tensors = [one for one in parts if isinstance(one, nn.Parameter)]
        if len(tensors) == len(names) and (len(names) != 2 or tensors[0].shape == tensors[1].shape):
            joined = [one.data for one in tensors]
            found += [(one, partial(part, joined, place)) for place, one in enumerate(tensors)]
        fused = getattr(module, FUSED, None) if names == PAIRS["gate and up"] and leaf == "weight" else None
        if isinstance(fused, nn.Linear):
            found.append((fused.weight, lambda old: order(old).contiguous()))
        if isinstance(fused, nn.Parameter) and fused.shape[-2] == 2 * module.down_proj.shape[-1]:
            found.append((fused, lambda old: order(old.transpose(0, 1)).transpose(0, 1).contiguous()))
    return found


# MLP and norms.


# Numbers that modules multiply by.
FACTOR = re.compile("scal|multipl|factor|alpha")


OPTION_TYPES = {"int": int, "float": float, "bool": bool, "none": type(None), "activation": nn.Module}


def changed_option(row: dict[str, Any], old: Any) -> Any:
    """Return the value of an option by its row: so much more but at least 1, the other flag, a value or none."""
    if "more" in row:
        return max(old + row["more"], 1)
    if "is" not in row:
        return not old if row["type"] == "bool" else None
    return ACT2FN[row["is"]] if row["type"] == "activation" else row["is"]


def option_variants(model: Any) -> Iterator[Variant]:
    known = [one for module in model.modules() for one in (module, getattr(module, "config", None))]
    unique = {id(one): one for one in known if one is not None}.values()
    for row in TABLE["option"]:
        options = [(one, name, getattr(one, name, ...)) for one in unique for name in row["names"]]
        alike = [option for option in options if isinstance(option[2], OPTION_TYPES[row["type"]])]
        changed = [(one, name, changed_option(row, old)) for one, name, old in alike]
        yield Variant(row["cause"], row["title"], attributes=changed)
    held = [(m, getattr(m, WINDOW, None)) for m in unique if hasattr(m, WINDOW) or hasattr(m, "o_proj")]
    sizes = [size for _, size in held if isinstance(size, int) and size > 0]  # 0 of Qwen2-MoE is none
    owners = [m for m, size in held if isinstance(size if sizes else m, int if sizes else nn.Module)]
    yield from scanned(partial(windowed, owners), WINDOWS, float(max(sizes, default=WIDEST)))
    factors: dict[str, list[tuple[nn.Module, Any]]] = {}
    for one in model.modules():
        for name, value in (vars(one) | dict(one.named_buffers(recurse=False))).items():
            is_number = isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1)
            if is_number and FACTOR.search(name):
                factors.setdefault(name, []).append((one, value))
    # The scale of a rotary table does the same as that of attention; the one that is not 1 is in use.
    for name, found in sorted(factors.items(), key=lambda item: float(item[1][0][1]) == 1.0):
        value = float(found[0][1])
        grid = sorted({*MULTIPLES, value, 1 / value} - {1.0}) if value > 0 else ()
        title = f"{name} of {type(found[0][0]).__name__}"
        yield from scanned(partial(multiplied, title, name, found), tuple(grid), 1.0)


def windowed(owners: list[Any], size: float) -> Variant:
    """Return the model with another window, which layers that have none hand on to their attention."""
    held = [(one, WINDOW, round(size)) for one in owners if hasattr(one, WINDOW)]
    given = {WINDOW: round(size)}
    other = [(one, "forward", partial(one.forward, **given)) for one in owners if not hasattr(one, WINDOW)]
    return Variant("R52", f"a window of {size:.0f} tokens", attributes=[*held, *other])


def multiplied(title: str, name: str, found: list[tuple[nn.Module, Any]], by: float) -> Variant:
    """Return the model with a number that its modules multiply by, times another."""
    value = float(found[0][1])
    done = {1 / value: "left out", value: "applied twice"}.get(by, f"times {by:.3g}")
    cause = "R49" if "RotaryEmbedding" in title else "R54"
    return Variant(cause, f"{title} {done}", attributes=[(one, name, old * by) for one, old in found])


def norm_variants(model: Any) -> Iterator[Variant]:
    """Yield norms of another scale, and those of one name left out."""
    every = [(n.rpartition(".")[2], m) for n, m in model.named_modules() if type(m).__name__.endswith("Norm")]
    norms = [(name, module) for name, module in every if isinstance(getattr(module, "weight", None), Tensor)]
    for name, by in (("1 + weight", 1.0), ("weight - 1", -1.0)):
        values = [(module.get_parameter("weight"), partial(torch.add, other=by)) for _, module in norms]
        yield Variant("R54", f"norms scaled by {name}", list(values))
    for names in (*((one,) for one in dict.fromkeys(name for name, _ in norms)), ("q_norm", "k_norm")):
        hooks = [(module, skip) for name, module in norms if name in names]
        yield Variant("R25.variant", f"{' and '.join(names)} skipped", hooks=list(hooks))
    yield after_positions(model)


def after_positions(model: Any) -> Variant:
    """Return the model that normalises the heads of q and k after their rotation."""
    found, normed = Variant("R54", "q_norm and k_norm after the rotary positions"), [model]

    def leave_out(layer: Any, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        normed[0] = layer
        return args[0]

    def rotate(own: Hook, q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        q, k = own(q, k, *args, **kwargs)
        return normed[0].q_norm.forward(q), normed[0].k_norm.forward(k)

    for layer in model.modules():
        norms: list[Any] = [getattr(layer, name, None) for name in ("q_norm", "k_norm")]
        if all(len(getattr(norm, "weight", ())) == head_size(model) for norm in norms):
            space = sys.modules[type(layer).__module__]
            found.hooks += [(norm, partial(leave_out, layer)) for norm in norms]
            found.attributes[:] = [(space, ROTATE, partial(rotate, getattr(space, ROTATE)))]
    return found


def skip(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Return a module's input in place of its output."""
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


# Embeddings, output layer, whole layers.


def head_variants(model: Any) -> Iterator[Variant]:
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    yield Variant("R26.rescaled", "an output layer of zeros", [(output.weight, torch.zeros_like)])
    if output.weight is not embedding.weight and output.weight.shape == embedding.weight.shape:
        values = [(output.weight, lambda old: embedding.weight.data)]
        yield Variant("R26.variant", "the embedding as output layer", list(values))


def layer_variants(model: Any) -> Iterator[Variant]:
    held: Any = getattr(model.get_decoder(), "layers", ())
    layers = list(held)
    last = len(layers) - 1
    for number, layer in enumerate(layers) if last > 0 else ():
        if len(layers) <= MOST_LAYERS or number in (0, last):
            yield Variant("R25.variant", f"layer {number} skipped", hooks=[(layer, skip)])
    for name, order in orders_of_layers(len(layers)).items():
        moved = [(held, str(place), held[source]) for place, source in enumerate(order) if place != source]
        yield Variant("R25.variant", name, attributes=moved)
    for number, (layer, after) in enumerate(itertools.pairwise(layers[:MOST_LAYERS])):
        for part, module in layer.named_children():
            theirs = dict(after.named_children()).get(part)
            if isinstance(theirs, type(module)) and any(weight.dim() > 1 for weight in module.parameters()):
                moved = [(layer, part, theirs), (after, part, module)]
                yield Variant(
                    "R25.variant", f"{part} of layers {number} and {number + 1} exchanged", attributes=moved
                )


def kind_variants(model: Any) -> Iterator[Variant]:
    """Yield each layer with its neighbour's type: with the window, positions and flags that go with it."""
    config, layers = model.config.get_text_config(), list(getattr(model.get_decoder(), "layers", ()))
    types = list(getattr(config, "layer_types", None) or ())
    for by, which in ((1, "next"), (-1, "previous")) if len({*types}) > 1 else ():
        moved: list[tuple[Any, str, Any]] = [(config, "layer_types", types[by:] + types[:by])]
        for layer, other in zip(layers, layers[by:] + layers[:by], strict=True):
            theirs = dict(other.named_modules())
            for path, module in layer.named_modules():
                values = vars(theirs.get(path, module)).items()
                moved += [(module, n, v) for n, v in values if isinstance(v, KINDS) and n != "layer_idx"]
        yield Variant("R52", f"each layer of the type (window) of the {which} one", attributes=moved)


KINDS = (str, int, type(None))  # of what differs between types of layers


def orders_of_layers(count: int) -> dict[str, list[int]]:
    """Return which layer's weights each layer has: exchanged, or those of another pipeline stage."""
    own = list(range(count))
    found = {}
    for number in own[: min(count - 1, MOST_LAYERS)]:
        order = [*own[:number], number + 1, number, *own[number + 2 :]]
        found[f"layers {number} and {number + 1} exchanged"] = order
    for stages in SHARDS if count > 2 else ():
        size = count // stages
        every = itertools.permutations(range(stages if count % stages == 0 else 0), 2)
        for one, other in (pair for pair in every if pair[1] == 0 or abs(pair[0] - pair[1]) == 1):
            here, there = range(one * size, (one + 1) * size), range(other * size, (other + 1) * size)
            name = f"layers {here[0]} to {here[-1]} with the weights of layers {there[0]} to {there[-1]}"
            found[name] = [*own[: here[0]], *there, *own[here[-1] + 1 :]]
    return found


def replaced(new: Tensor, old: Tensor) -> Tensor:
    return new


HOW = {0.5: "halved", 2.0: "doubled", 0.0: "zero", -1.0: "with the other sign"}


def times(cause: str, of: str, tensors: list[Tensor], by: float) -> Variant:
    if "layers.*" in of and by > 0:  # what they give may be multiplied
        cause, of = "R54", f"{of}, or what it gives,"
    values = [(one, partial(torch.mul, other=by)) for one in tensors]
    return Variant(cause, f"{of} {HOW.get(by, f'times {by:.3g}')}", list(values), family=of.partition(",")[0])


def changed_tensors(model: Any) -> Iterator[Variant]:
    """Yield changes of each tensor, of those of one name in all layers, and of all biases of a module."""
    named = tensors_of(model)
    groups: dict[str, list[Tensor]] = {}
    for name, tensor in named.items():
        alike = LAYER.sub("layers.*.", name)
        module, _, leaf = alike.rpartition(".")
        every = {alike}
        if leaf == "bias" and "." in module:
            every.add(f"{module.rpartition('.')[0]}.*.bias")
        if leaf == "bias" and f"{module}.weight".endswith(BY_COLUMNS):
            every.add("biases of layers that are summed over ranks")
        for one in sorted({*every, name} if len(named) <= MOST_TENSORS else every):
            groups.setdefault(one, []).append(tensor)
    for name, tensors in groups.items():
        cause = "R26.rescaled" if any(word in name for word in VOCABULARY_WORDS) else "R25.variant"
        changed = partial(times, cause, name, tensors)
        yield from scanned(changed, MULTIPLES[1:3], 1.0)
        yield from map(changed, (0.0, -1.0))
        square = [one for one in tensors if one.dim() > 1 and one.shape[-1] == one.shape[-2]]
        yield Variant(cause, f"{name} transposed", [(one, lambda old: old.mT.contiguous()) for one in square])


# Experts.


def expert_variants(model: Any) -> Iterator[Variant]:
    choosing = [module for module in model.modules() if isinstance(getattr(module, "top_k", None), int)]
    routers_of = [one for one in choosing if type(one).__name__.lower().endswith("topkrouter")]
    for name, hook in ROUTINGS.items():
        hooks = [(one, hook) for one in routers_of if name != BIASED or hasattr(one, CORRECTION)]
        yield Variant("R54", f"experts {name}", hooks=list(hooks))
    whole = [(one, whole_bias) for one in model.modules() if hasattr(one, "down_proj_bias")]
    yield Variant("R54", "the output bias of each expert added without its weight", hooks=list(whole))
    stacked = [one for one in model.modules() if isinstance(getattr(one, "down_proj", None), nn.Parameter)]
    tensors = [(p, len(one.down_proj)) for one in stacked for p in one.parameters(recurse=False)]
    orders: dict[str, Order] = {}
    for count in SHARDS:
        orders |= {f"of {by} of {count} ranks further": partial(rolled, by, count) for by in range(1, count)}
        orders[f"interleaved over {count} ranks"] = partial(regrouped, count, -1)
        orders[f"interleaved over {count} ranks the other way"] = partial(regrouped, -1, count)
    for name, order in orders.items():
        values = [(p, order) for p, number in tensors if len(p) == number]
        yield Variant("R25.variant", f"experts {name}", list(values))
    shared = [one for name, one in model.named_modules() if name.endswith(SHARED_EXPERTS)]
    scales = {getattr(one, "routed_scaling_factor", 1.0) for one in routers_of}
    grid = tuple(sorted({*MULTIPLES, *scales} - {1.0}))
    yield from scanned(partial(scaled, "the shared expert", shared), grid, 1.0)
    gates = [module for name, module in model.named_modules() if name.endswith("shared_expert_gate")]
    opened = [(gate, lambda *args: torch.full_like(args[-1], 100.0)) for gate in gates]  # of a sigmoid
    yield Variant("R54", "the shared expert without its gate", hooks=list(opened))


def rolled(by: int, count: int, old: Tensor) -> Tensor:
    return old if len(old) % count else old.roll(-by * len(old) // count, 0)


def with_shard(other: Tensor, rank: int, count: int, dim: int, old: Tensor) -> Tensor:
    """Take the part of one rank from another tensor, or from one number."""
    new = old.clone()
    new.chunk(count, dim)[rank].copy_(other.expand_as(new).chunk(count, dim)[rank])
    return new


def shards_of(now: Any, other: Any, cause: str) -> Iterator[Variant]:
    """Yield the model with one rank's part of tensors of another checkpoint, or with its vision tower."""
    mine, theirs = tensors_of(now), tensors_of(other)
    kinds = {
        "all tensors": [name for name, p in mine.items() if p.dim() == 2 or name.endswith("proj.bias")],
        "the experts": [name for name, p in mine.items() if p.dim() == 3],
        "the vocabulary": [name for name in mine if any(word in name for word in VOCABULARY_WORDS)],
    }
    for (of, names), count in itertools.product(kinds.items(), SHARDS):
        dims = {name: int(name.endswith(BY_COLUMNS) and mine[name].dim() == 2) for name in names}
        cut = {name: dim for name, dim in dims.items() if mine[name].shape[dim] % count == 0}
        for rank in range(count):
            values = [(mine[n], partial(with_shard, theirs[n].data, rank, count, d)) for n, d in cut.items()]
            yield Variant(cause, f"shard {rank} of {count} of {of}", list(values))
    if hasattr(now.config, "vision_config"):
        tower = [(mine[name], partial(replaced, theirs[name].data)) for name in vision_tensors(now)]
        yield Variant("R65", "the vision tower", list(tower))


def scaled(of: str, modules: list[nn.Module], by: float) -> Variant:
    hooks = [(module, lambda *args: by * args[-1]) for module in modules]
    return Variant("R54", f"the output of {of} times {by:.3g}", hooks=list(hooks))


def whole_bias(module: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    """Add the part of the chosen experts' output bias that their weights leave out."""
    given: tuple[Tensor, ...] = (*args, *kwargs.values())
    _, chosen, weights = given
    missing = (1 - weights)[..., None] * module.down_proj_bias[chosen]
    return output + missing.sum(-2).view_as(output)


def routed(
    score: Callable[..., Tensor], module: Any, args: Any, kwargs: Any, output: Any, is_biased: bool = False
) -> Any:
    """Choose and weigh experts by another function of the router's logits [tokens, experts].

    `is_biased`: the same experts, weighed by what they are chosen by.
    """
    logits, own, chosen = output
    scores = score(logits.float())
    corrected = scores + getattr(module, CORRECTION, 0.0)
    chosen = chosen if is_biased else torch.topk(corrected, module.top_k, -1)[1]
    weights = (corrected if is_biased else scores).gather(-1, chosen)
    if getattr(module, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, (weights * getattr(module, "routed_scaling_factor", 1.0)).to(own.dtype), chosen


SHARED_EXPERTS = ("shared_expert", "shared_experts")
CORRECTION, BIASED = "e_score_correction_bias", "weighed by scores with their correction bias"
ROUTINGS: dict[str, Hook] = {
    "routed by a softmax": partial(routed, partial(torch.softmax, dim=-1)),
    "routed by a sigmoid": partial(routed, torch.sigmoid),
    BIASED: partial(routed, torch.sigmoid, is_biased=True),
}


# Quantised weights.


def quantized_variants(model: Any) -> Iterator[Variant]:
    """Yield the model whose linear layers, but for the output layer, are quantised: weights, inputs as well."""
    linear = [module for module in model.base_model.modules() if isinstance(module, nn.Linear)]
    weights = [layer.weight for layer in linear] + [p for p in model.base_model.parameters() if p.dim() == 3]
    for name, scheme in SCHEMES.items():
        values = [(weight, partial(in_scheme, scheme)) for weight in weights]
        yield Variant("R44", f"weights in {name}", list(values), family=name)
        if name in OF_INPUTS:
            hooks = [(layer, partial(with_inputs, OF_INPUTS[name])) for layer in linear]
            found = Variant("R44", f"weights in {name}, and inputs", list(values), hooks=list(hooks))
            yield replace(found, family=name)


def in_scheme(scheme: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    return scheme(values.float()).to(values.dtype)


def with_inputs(scheme: Hook, layer: nn.Linear, args: Any, kwargs: Any, output: Any) -> Any:
    return nn.functional.linear(in_scheme(scheme, args[0]), layer.weight, layer.bias)


def rounded_to_float8(
    values: Tensor, of: list[int] | tuple[int, ...] = (-1,), in_powers: bool = False
) -> Tensor:
    """Round with one scale a row, or over the dimensions `of`."""
    most = torch.finfo(torch.float8_e4m3fn).max
    scale = rounded_up(values.abs().amax(of, keepdim=True).clamp(min=1e-12) / most, in_powers)
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def in_blocks(values: Tensor, size: int, in_powers: bool = False) -> Tensor:
    """Round to float8 with one scale for each square block, the last of which may be smaller."""
    rows, columns = values.shape[-2:]
    padded = nn.functional.pad(values, (0, -columns % size, 0, -rows % size))
    blocks = padded.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    rounded = rounded_to_float8(blocks, (-3, -1), in_powers)
    return rounded.flatten(-4, -3).flatten(-2, -1)[..., :rows, :columns]


def in_groups(values: Tensor, group: int | None) -> Tensor:
    return values if group is None or values.shape[-1] % group else values.reshape(-1, group)


def rounded_to_integers(values: Tensor, bits: int, group: int | None = None) -> Tensor:
    groups, most = in_groups(values, group), 2 ** (bits - 1) - 1
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / most
    return ((groups / scale).round().clamp(-most - 1, most) * scale).reshape(values.shape)


def rounded_from_zero_point(values: Tensor, bits: int, group: int) -> Tensor:
    """Round between the smallest and the largest number of each group."""
    groups = in_groups(values, group)
    low, high = torch.aminmax(groups, dim=-1, keepdim=True)
    scale = (high - low).clamp(min=1e-12) / (2**bits - 1)
    return (((groups - low) / scale).round() * scale + low).reshape(values.shape)


def rounded_to_float4(values: Tensor, group: int, in_powers: bool = False) -> Tensor:
    """Round to e2m1, with one scale a group."""
    groups, levels = in_groups(values, group), torch.tensor(FLOAT4, device=values.device)
    scale = rounded_up(groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / FLOAT4[-1], in_powers)
    edges = (levels[1:] + levels[:-1]) / 2
    return (levels[torch.bucketize((groups / scale).abs(), edges)] * groups.sign() * scale).reshape(
        values.shape
    )


def rounded_up(scale: Tensor, in_powers: bool) -> Tensor:
    """Return scales as they are, or the next powers of two."""
    return torch.exp2(scale.log2().ceil()) if in_powers else scale


FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCHEMES: dict[str, Callable[[Tensor], Tensor]] = {
    row.pop("name"): partial(one, **row)
    for one in (rounded_to_float8, in_blocks, rounded_to_integers, rounded_from_zero_point, rounded_to_float4)
    for row in TABLE[one.__name__]
}
OF_INPUTS = {name: SCHEMES[name.partition(" ")[0]] for name in SCHEMES if "4" not in name}  # a scale a token
