"""Anatomy of a gradient: what each loss term, class of token and turn contributes to it.

The loss of a micro-batch depends on the weights through the log-prob and the entropy of each token
only. So its gradient is a sum over tokens of `dL/dlogprob` and `dL/dentropy`, times the derivatives
of the model; a part of the loss, or of its tokens, is the same backward pass with the other
derivatives set to 0. One pass for each part gives its exact share `<gi, G> / |G|^2` and its norm.

```
objective.loss -> terms -> dL/d(logprob, entropy) [tokens, 2] -- of one part --> backward -> gi
                                                     share, norm <- exact --+
                          direction to other parts <- sketch [SKETCH_SIZE] <-+
```

No part's gradient is kept: the angle between two parts is that of their sketches, sums of random
signs (a count sketch: Charikar, Chen, Farach-Colton 2002), whose inner products are unbiased with a
standard error of at most |gi| |gj| sqrt(2 / SKETCH_SIZE).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal_core.algorithm.alignment import shifted_left
from areal_core.data.batch import FINISH_REASONS, Batch
from areal_core.trainer.objective import PolicyObjective
from areal_core.trainer.rl import PPOTrainer

SKETCH_SIZE = 4096
PIECE = 1 << 20  # elements that are projected at a time
CLASSES = ("prompt", "tool", "reasoning", "answer", "end")
REST = "not named"  # what an own objective adds to the terms that it names
ROUNDING = 1e-5  # of the largest derivative, below which a remainder is rounding
HIDES = 1000.0  # the ratio of norms from which a term hides another one


@dataclass(frozen=True)
class Part:
    """One part of a minibatch's gradient, over all ranks.

    Attributes:
        kind: "term", "class" (of tokens) or "turn".
        value: a term's part of the minibatch's loss; NaN for other kinds.
        num_tokens: tokens on whose log-prob or entropy its loss depends.
        num_outside: those of them outside of the loss mask, where the model computes neither.
        attached: its loss is a function of log-probs or entropies; it has no derivative otherwise.
        gradient_share, gradient_norm: as those of a `SampleShare`.
        cosines: of the angle to the other parts of its kind, estimated.
    """

    kind: str
    name: str
    minibatch: int
    value: float
    num_tokens: int
    num_outside: int
    attached: bool
    gradient_share: float
    gradient_norm: float
    cosines: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Remark:
    """What is wrong with a part of a step: `kind` is dead, outside, idle or hidden."""

    kind: str
    part: str
    minibatches: list[int]
    evidence: str

    @property
    def is_fault(self) -> bool:
        """Whether it is wrong in every run; an idle or hidden term may be meant so."""
        return self.kind in ("dead", "outside")


@dataclass
class Facets:
    """What one pass over a rank's tokens has seen of each part, by (kind, name)."""

    values: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    num_tokens: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    num_outside: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    attached: set[tuple[str, str]] = field(default_factory=set)


def dissect(
    trainer: PPOTrainer,
    objective: PolicyObjective,
    facts: Mapping[str, Any],
    full: Sequence[Tensor | None],
    norm: float,
) -> list[Part]:
    """Compute the parts of a minibatch's gradient; a collective. Leaves other gradients behind.

    Args:
        objective: with statistics of its own.
        facts: of the event `gradients`.
        full: the gradient of each parameter that has one.
    """
    ranks, engine = trainer.ranks, trainer.actor
    parameters = [p for p in engine.model.parameters() if p.grad is not None]
    batch = facts["batch"] | token_classes(facts["batch"], trainer.tokenizer)
    groups = engine.divide(batch)

    def run(loss: Callable[..., Tensor]) -> list[Tensor | None]:
        parts = [(batch, rows) for rows in groups]
        list(engine.gradients(parts, loss, objective.denominator, facts["total_weight"]))
        return [parameter.grad for parameter in parameters]

    seen = Facets()
    run(lambda *inputs: examine(objective, inputs, seen))
    everyone = ranks.gather_leaders(seen)
    keys = dict.fromkeys(key for rank in everyone for key in rank.num_tokens)
    parts, sketches = [], {}
    for kind, name in sorted(keys, key=lambda key: (["term", "class", "turn"].index(key[0]), order_of(*key))):
        own = run(lambda *inputs, key=(kind, name): only(objective, inputs, key))
        along, length = (float(ranks.sum_parts(dot(own, other))) for other in (full, own))
        sketches[kind, name] = ranks.sum_parts(sketch(own, torch.distributed.get_rank()))
        has_shares = 0 < norm < math.inf
        key = (kind, name)
        parts.append(
            Part(
                kind,
                name,
                facts["minibatch"],
                sum(rank.values[key] for rank in everyone) / facts["total_weight"]
                if kind == "term"
                else math.nan,
                sum(rank.num_tokens[key] for rank in everyone),
                sum(rank.num_outside[key] for rank in everyone),
                any(key in rank.attached for rank in everyone),
                along / norm**2 if has_shares else math.nan,
                length**0.5 / (norm if has_shares else 1.0),
            )
        )
    return [replace(part, cosines=cosines_of(part, sketches)) for part in parts]


def order_of(kind: str, name: str) -> tuple[int, str]:
    if kind == "class":
        return CLASSES.index(name), ""
    return int(name) if kind == "turn" else 0, name


def cosines_of(part: Part, sketches: Mapping[tuple[str, str], Tensor]) -> dict[str, float]:
    """Return the cosine to each other part of the same kind with a gradient, at most 1."""
    own, found = sketches[part.kind, part.name], {}
    for (kind, name), other in sketches.items():
        sizes = float(own.norm() * other.norm())
        if kind == part.kind and name != part.name and 0 < sizes < math.inf:
            found[name] = min(1.0, max(-1.0, float(own @ other) / sizes))
    return found


def derivatives(objective: PolicyObjective, inputs: Sequence[Any]) -> dict[str, tuple[float, Tensor, bool]]:
    """Return the value, the derivatives [tokens, 2], and whether it has a graph, of each term."""
    logprobs, entropy, flat = inputs
    leaves = [logprobs.detach().requires_grad_(), entropy.detach().requires_grad_()]
    terms: dict[str, Tensor] = {}

    def note(name: str, loss: Tensor) -> None:
        terms[name] = terms[name] + loss if name in terms else loss

    total = replace(objective, on_term=note).loss(leaves[0], leaves[1], flat)
    found = {name: (float(loss.detach()), *derivative_of(loss, leaves)) for name, loss in terms.items()}
    value, of_total, attached = float(total.detach()), *derivative_of(total, leaves)
    rest = of_total - sum(of_term for _, of_term, _ in found.values())
    rest_value = value - sum(of_term for of_term, _, _ in found.values())
    is_more = (rest.abs() > ROUNDING * of_total.abs().max()).any() or abs(rest_value) > ROUNDING * max(
        abs(value), *(abs(of_term) for of_term, _, _ in found.values()), 1e-30
    )
    if type(objective) is not PolicyObjective and bool(is_more):
        found[REST] = (rest_value, rest, attached)
    return found


def derivative_of(loss: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Return d loss / d(logprob, entropy), [tokens, 2], and whether there is one."""
    if not loss.requires_grad:
        return torch.zeros_like(torch.stack([leaf.detach() for leaf in leaves], 1)), False
    found = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    is_there = any(gradient is not None for gradient in found)
    zeros = torch.zeros_like(leaves[0])
    return torch.stack([zeros if gradient is None else gradient for gradient in found], 1), is_there


def examine(objective: PolicyObjective, inputs: Sequence[Any], seen: Facets) -> Tensor:
    """Note the parts of a micro-batch; return a loss without a gradient."""
    logprobs, _, flat = inputs
    outside = ~flat["loss_mask"].bool()
    terms = derivatives(objective, inputs)
    for name, (value, of_term, attached) in terms.items():
        key, acts = ("term", name), (of_term != 0).any(1)
        seen.values[key] += value
        seen.num_tokens[key] += int(acts.sum())
        seen.num_outside[key] += int((acts & outside).sum())
        if attached:
            seen.attached.add(key)
    acts = torch.stack([of_term for _, of_term, _ in terms.values()]).sum(0).ne(0).any(1)
    for kind, column in (("class", "token_class"), ("turn", "turn_of_next")):
        for value in flat[column][acts].unique().tolist() if column in flat else []:
            if value < 0 or (kind == "turn" and value == 0):
                continue
            key = kind, CLASSES[value] if kind == "class" else str(value)
            chosen = acts & (flat[column] == value)
            seen.num_tokens[key] += int(chosen.sum())
            seen.num_outside[key] += int((chosen & outside).sum())
            seen.attached.add(key)
    return logprobs.sum() * 0.0


def only(objective: PolicyObjective, inputs: Sequence[Any], key: tuple[str, str]) -> Tensor:
    """Return a loss whose gradient is that of one part; its value has no meaning."""
    logprobs, entropy, flat = inputs
    terms, (kind, name) = derivatives(objective, inputs), key
    chosen = [of_term for term, (_, of_term, _) in terms.items() if kind != "term" or term == name]
    total = torch.stack(chosen).sum(0) if chosen else logprobs.new_zeros(len(logprobs), 2)
    if kind != "term":
        column, value = (
            ("token_class", CLASSES.index(name)) if kind == "class" else ("turn_of_next", int(name))
        )
        total = torch.where((flat[column] == value)[:, None], total, 0.0)
    return (total[:, 0] * logprobs + total[:, 1] * entropy).sum()


def token_classes(batch: Batch, tokenizer: Any) -> Batch:
    """Return the class of the token that each position is about, and its turn, int32 [B, T].

    Tokens that the engine did not sample (version -1) are the prompt or, after a sampled one, what
    a tool returned. -1 is padding. Reasoning ends with the tokens of `</think>`; a token that ended
    its span, unless the row was cut there, is the end.
    """
    mask = batch["loss_mask"].bool()
    sampled = batch["versions"] >= 0 if bool((batch["versions"] >= 0).any()) else mask
    real = shifted_left(batch["attention_mask"].int(), 0).bool()
    tokens = shifted_left(batch["input_ids"], 0)
    closing = [] if tokenizer is None else tokenizer.encode("</think>", add_special_tokens=False)
    classes = torch.full_like(tokens, -1, dtype=torch.int32)
    for row, (is_sampled, is_real) in enumerate(zip(sampled, real, strict=True)):
        columns = is_sampled.nonzero()[:, 0].tolist()
        classes[row, is_real] = CLASSES.index("tool")
        classes[row, is_real & (torch.arange(len(is_real)) < (columns or [len(is_real)])[0])] = 0
        spans = spans_of(columns)
        for number, (first, last) in enumerate(spans):
            span = tokens[row, first : last + 1].tolist()
            size = len(closing)
            ends = [i + size for i in range(len(span) - size + 1) if size and span[i : i + size] == closing]
            classes[row, first : last + 1] = CLASSES.index("answer")
            classes[row, first : first + (ends[-1] if ends else 0)] = CLASSES.index("reasoning")
            if number < len(spans) - 1 or FINISH_REASONS[int(batch["finish_reason"][row])] == "stop":
                classes[row, last] = CLASSES.index("end")
    found = {"token_class": classes}
    return found | ({"turn_of_next": shifted_left(batch["turns"], 0)} if "turns" in batch else {})


def spans_of(columns: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last column of each run of consecutive ones, ascending."""
    starts = [c for i, c in enumerate(columns) if i == 0 or columns[i - 1] != c - 1]
    ends = [c for i, c in enumerate(columns) if i + 1 == len(columns) or columns[i + 1] != c + 1]
    return list(zip(starts, ends, strict=True))


def remarks_of(parts: Sequence[Part], reason: str) -> list[Remark]:
    """Return what is wrong with parts of a step, faults first.

    Args:
        reason: why no token has a gradient, where every token has the same reason, else "".
    """
    found, by_name = [], defaultdict(list)
    for part in parts:
        by_name[part.kind, part.name].append(part)
    largest = {m: max((p for p in parts if p.kind == "term" and p.minibatch == m), key=attrgetter("gradient_norm"), default=None)
               for m in {part.minibatch for part in parts}}  # fmt: skip
    for (kind, name), ones in by_name.items():
        remark = partial(Remark, part=name, minibatches=[part.minibatch for part in ones])
        values = ", ".join(f"{part.value:.3g}" for part in ones)
        if kind == "term" and all(part.gradient_norm == 0 for part in ones):
            if not any(part.value for part in ones):
                found.append(remark("idle", evidence=f"loss and gradient are 0. {reason}".strip()))
            else:
                why = reason or "its derivative to every log-prob and entropy is 0"
                if not any(part.attached for part in ones):
                    why = "it is computed without a graph (detached, or under no_grad)"
                elif all(part.num_tokens == part.num_outside > 0 for part in ones):
                    why = "it depends on tokens outside of the loss mask only"
                zero = f"its loss is {values}, its gradient is exactly 0: {why}"
                found.append(remark("dead", evidence=zero))
        elif kind == "term":
            hiding = [(part, top) for part in ones if (top := largest[part.minibatch]) is not None
                      and 0 < part.gradient_norm * HIDES < top.gradient_norm]  # fmt: skip
            if len(hiding) == len(ones):
                ratio = min(top.gradient_norm / part.gradient_norm for part, top in hiding)
                larger = f"the gradient of {hiding[0][1].name} is {ratio:.3g} times as large"
                found.append(remark("hidden", evidence=larger))
        if kind == "term" and (outside := sum(part.num_outside for part in ones)):
            found.append(remark("outside", evidence=f"it reads {outside} tokens outside of the loss mask"))
        if kind == "class" and name in ("prompt", "tool") and any(part.gradient_norm for part in ones):
            count = sum(part.num_tokens for part in ones)
            given = (
                f"{count} {name} tokens, which the engine did not sample (version -1), are in the loss mask"
            )
            found.append(remark("outside", evidence=given))
    return sorted(found, key=lambda remark: not remark.is_fault)


def sketch(gradients: Iterable[Tensor | None], rank: int, size: int = SKETCH_SIZE) -> Tensor:
    """Project this rank's shards of a gradient on random signs: float64 [size]; additive."""
    found = torch.zeros(size, dtype=torch.float64)
    for number, gradient in enumerate(gradients):
        values = None if gradient is None else local(gradient).reshape(-1)
        for start in range(0, 0 if values is None else len(values), PIECE):
            assert values is not None
            piece = values[start : start + PIECE].double().cpu()
            random = torch.Generator().manual_seed((rank << 48) + (number << 32) + start // PIECE)
            code = torch.randint(2 * size, (len(piece),), generator=random)
            found.index_add_(0, code // 2, piece * (1 - 2 * (code % 2)))
    return found


def dot(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> Tensor:
    """Compute the inner product of this rank's shards of two gradients, float64 []."""
    pairs = [
        (local(a), local(b)) for a, b in zip(left, right, strict=True) if a is not None and b is not None
    ]
    return torch.stack([(a.double() * b.double()).sum().cpu() for a, b in pairs]).sum()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard; empty if it is a replica of another rank's."""
    if not isinstance(tensor, DTensor):
        return tensor
    places = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
    is_copy = any(coordinate > 0 and placed.is_replicate() for coordinate, placed in places)
    return tensor.to_local()[:0] if is_copy else tensor.to_local()
