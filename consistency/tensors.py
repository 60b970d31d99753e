"""Weights that an engine may have held instead: of earlier steps, of the base model, some tensors.

Each hypothesis predicts the log-prob of every token. It is judged by the Gaussian log-likelihood
that it gains over the weights of the tokens' own version, in nats:

    n / 2 * log(sum of (engine - now)^2 / sum of (engine - hypothesis)^2)

so that a fault far below the noise of one token shows in many tokens, and few tokens show little.
"""

import copy
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consistency.score import Scorer, image_inputs, score_logprobs, scorer_of
from consistency.tokens import Floats, Sequences
from consistency.transforms import RESIDUAL_BOUND, bounded, select_rows, spread_rows

# Rounding of a recorded float32 log-prob: a residual below it is 0.
ROUNDING = 1e-6
# A hypothesis gains so much by chance once in 200,000 times, whatever the noise.
LEAST_NATS = 10.0
# More tensors than this are first tried as layers.
MOST_TENSORS = 64

LAYER = re.compile(r"layers\.(\d+)\.")

Names = tuple[str, ...]


@dataclass(frozen=True)
class Fit:
    """A hypothesis: the nats that it gains, the mean |difference| that it leaves and explains."""

    name: str
    nats: float
    residual: float
    difference: float


@dataclass(frozen=True)
class StaleTensors:
    """The tensors of the engine, of `num_tensors`, that still have their values of before."""

    names: Names
    num_tensors: int
    fit: Fit

    def describe(self) -> str:
        """Name the first of them."""
        more = len(self.names) - 3
        return ", ".join(self.names[:3]) + (f" and {more} more" if more > 0 else "")


def squares(engine: Floats, predicted: Floats) -> float:
    """Sum of bounded squares of the difference, at least that of rounding."""
    size = np.minimum(np.abs(engine - predicted), RESIDUAL_BOUND)
    return float((size**2).sum() + len(size) * ROUNDING**2)


def nats_gained(engine: Floats, now: Floats, predicted: Floats) -> float:
    """Log-likelihood that a prediction gains over another one; all [n]."""
    return float(len(engine) / 2 * np.log(squares(engine, now) / squares(engine, predicted)))


def fit(name: str, engine: Floats, now: Floats, predicted: Floats) -> Fit:
    """Compare a hypothesis with the weights that should have sampled; all [n]."""
    residual, difference = (float(bounded(engine - values).mean()) for values in (predicted, now))
    return Fit(name, nats_gained(engine, now, predicted), residual, difference)


def find_stale_tensors(
    now: Scorer, before: Scorer, rows: Sequences, temperature: float
) -> StaleTensors | None:
    """Find the tensors whose old values explain the engine's log-probs; None if none do.

    The effects of single tensors are added up, beginning with the nearer of both versions: right
    for small updates. The set that is found is then scored as a whole, also with the other tensors of
    its modules and of its layers: those of one module multiply each other.
    """
    engine, mine, theirs = rows.engine_logprobs[rows.scored], tensors_of(now.model), tensors_of(before.model)
    names = tuple(name for name, tensor in mine.items() if not torch.equal(tensor, theirs[name]))

    def logprobs(stale: Names) -> Floats:
        with swapped(now, before, stale):
            return score_logprobs(now, rows, temperature=temperature)

    base, old = logprobs(()), logprobs(names)
    is_nearer_old = squares(engine, old) < squares(engine, base)
    start = old if is_nearer_old else base

    def effect(group: Names) -> Floats:
        stale = tuple(name for name in names if name not in group) if is_nearer_old else group
        return logprobs(stale) - start

    groups: list[Names] = [(name,) for name in names]
    if len(groups) > MOST_TENSORS:
        layers = dict.fromkeys(map(module_of, names))
        groups = [tuple(name for name in names if module_of(name) == layer) for layer in layers]
    chosen = add_up(engine, start, {group: effect(group) for group in groups})
    if len(chosen) == 1 and len(chosen[0]) > 1:  # one layer: which of its tensors
        chosen = add_up(engine, start, {(name,): effect((name,)) for name in chosen[0]}) or chosen
    moved = {name for group in chosen for name in group}
    found: list[StaleTensors] = []
    for whole in (str, of_module, module_of):
        places = set(map(whole, moved))
        stale = tuple(name for name in names if (whole(name) in places) != is_nearer_old)
        if moved and stale and all(stale != one.names for one in found):
            fitted = fit("tensors of the version before", engine, base, logprobs(stale))
            found.append(StaleTensors(stale, len(names), fitted))
    return max(found, key=lambda one: one.fit.nats, default=None)


def of_module(name: str) -> str:
    """Return the module that a parameter's own module is in, such as `model.layers.1.mlp`."""
    return name.rsplit(".", 2)[0]


def module_of(name: str) -> str:
    """Return the layer of a parameter, such as `layer 3`, or its module outside of layers."""
    inside = LAYER.search(name)
    return f"layer {inside[1]}" if inside else name.removeprefix("model.").removesuffix(".weight")


def vision_tensors(model: Any) -> Names:
    text = {id(parameter) for parameter in model.get_decoder().parameters()}
    text |= {id(parameter) for parameter in model.get_output_embeddings().parameters()}
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) not in text)


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Return the parameters and the buffers of a checkpoint, such as a router's correction bias, by name."""
    kept, buffers = model.state_dict().keys(), model.named_buffers()
    return dict(model.named_parameters()) | {name: buffer for name, buffer in buffers if name in kept}


@contextmanager
def with_values(values: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Give tensors other values, and take them back at the end."""
    kept = [(tensor, tensor.data, new) for tensor, new in values]
    for tensor, _, new in kept:
        tensor.data = new
    try:
        yield
    finally:
        for tensor, old, _ in kept:
            tensor.data = old


def swapped(now: Scorer, before: Scorer, names: Names) -> AbstractContextManager[None]:
    """Give some tensors of a model the values of another one."""
    mine, theirs = (tensors_of(scorer.model) for scorer in (now, before))
    return with_values([(mine[name], theirs[name].data) for name in names])


def add_up(engine: Floats, start: Floats, effects: dict[Names, Floats]) -> list[Names]:
    """Add the effect that explains most, until none explains more than chance; arrays [n]."""
    predicted = start
    chosen: list[Names] = []
    while left := [group for group in effects if group not in chosen]:
        best = min(left, key=lambda group: squares(engine, predicted + effects[group]))
        if nats_gained(engine, predicted, predicted + effects[best]) < LEAST_NATS:
            break
        predicted = predicted + effects[best]
        chosen.append(best)
    return chosen


TOKENS = 512
MOST_PARAMETERS = 20_000_000
ELEMENTS_AT_A_TIME = 50_000_000  # of gradients
SKETCH = 8192  # elements of a tensor's gradient that are kept, larger ones are hashed to as many
VOCABULARY_WORDS = ("embed", "lm_head", "wte")
EVERY = "all tensors"
TOWER = "the vision tower"
MARGIN_NATS = 12.0  # over the next tensor
CLEAR_NATS = 40.0  # over noise alone, of weights where the tensor stays open
MOST_NOISE = 0.2  # of the size of D, that an exact change may leave as noise
MOST_LEFT = 0.3  # of it, where a change was only weighed
FLIPPED = 6.0  # times the median of |D|: tokens for which a router chose other experts
LARGEST = 0.5  # root mean square of D, in nats, up to which the first order holds
SCALES = np.logspace(-3, 9, 49)


@dataclass(frozen=True)
class ChangedTensor:
    """The tensor, the nats by which it beats the next one and noise alone, and what it leaves.

    `noise` is the share of the root mean square of D that stays unexplained. Where several tensors
    are about as likely, `is_open` is true, and `name` lists the likeliest.
    """

    name: str
    margin: float
    nats: float
    noise: float
    is_open: bool = False


def find_changed_tensor(
    scorer: Scorer, rows: Sequences, temperature: float, rounding: float = 0.0
) -> ChangedTensor | None:
    """Find the tensor whose change explains the engine's logprobs; None if none clearly does.

    `rounding` is the root mean square that the dtypes of both sides may leave, in nats.
    """
    if sum(p.numel() for p in scorer.model.parameters()) > MOST_PARAMETERS:
        return None
    if scorer.model.dtype != torch.float32:  # the engine's rounding alone is noise enough
        scorer = scorer_of(copy.deepcopy(scorer.model).float(), scorer.processor)
    sample = select_rows(rows, spread_rows(rows, TOKENS))
    base = score_logprobs(scorer, sample, temperature=temperature)
    difference = sample.engine_logprobs[sample.scored] - base
    most = RESIDUAL_BOUND
    if any(p.dim() == 3 for p in scorer.model.parameters()):  # other experts: no small change
        most = min(most, FLIPPED * float(np.nanmedian(np.abs(difference))))
    usable = np.isfinite(difference) & (np.abs(difference) <= most)
    if usable.sum() < 0.8 * len(usable) or not difference[usable].any():
        return None
    size = float(np.sqrt(np.mean(difference[usable] ** 2)))
    if size > LARGEST:
        return None
    kept = torch.as_tensor(np.flatnonzero(usable))
    kernels = {
        name: kernel[kept][:, kept] for name, kernel in kernels_of(scorer, sample, temperature).items()
    }
    tower = [] if sample.images is None else vision_tensors(scorer.model)
    sizes = {name: mean_square(parameter) for name, parameter in scorer.model.named_parameters()}
    every = torch.stack([kernel / sizes[name] for name, kernel in kernels.items()]).sum(0)
    groups = groups_of(tuple(kernels)) | ({TOWER: {*tower}} if tower else {})
    members = {name: {name} for name in kernels} | groups | {EVERY: {*kernels}}
    kernels |= {name: torch.stack([kernels[one] for one in of]).sum(0) for name, of in groups.items()}
    kernels[EVERY] = every
    target = torch.as_tensor(difference[usable])
    alone = -len(target) / 2 * np.log(size**2)
    weighed = {name: evidence(kernel, target) for name, kernel in kernels.items()}
    ranked = sorted(weighed, key=lambda name: -weighed[name][0])
    first, second = ranked[:2]
    near = [name for name in ranked if weighed[first][0] - weighed[name][0] <= MARGIN_NATS]
    around = [name for name, of in groups.items() if all(members[one] <= of for one in near)]
    if len(near) > 1 and around:
        # Which tensor of the group it is stays open, not that it is in the group.
        first = min(around, key=lambda name: len(groups[name]))
        second = next(name for name in ranked if not members[name] <= groups[first])
    nats, noise = weighed[first]
    found = ChangedTensor(first, nats - weighed[second][0], nats - alone, noise / size)
    if noise > max(MOST_LEFT * size, rounding) or found.nats < MARGIN_NATS:
        return None
    if found.margin > MARGIN_NATS:
        return found
    if found.nats < CLEAR_NATS or noise > max(MOST_NOISE * size, rounding):
        return None
    return replace(found, name=", ".join(near[:3]), is_open=True)


def groups_of(names: Names) -> dict[str, set[str]]:
    """Return the tensors of one name in all layers, and those of one module in all layers."""
    groups: dict[str, set[str]] = {}
    for name in names:
        alike = LAYER.sub("layers.*.", name)
        for group in {alike, of_module(alike)} if alike != name else ():
            groups.setdefault(group, set()).add(name)
    return {group: of for group, of in groups.items() if len(of) > 1 and not group.endswith("*")}


def kernels_of(scorer: Scorer, rows: Sequences, temperature: float) -> dict[str, Tensor]:
    """Compute J J^T of each tensor, float64 [tokens, tokens], times the tensor's mean square."""
    model = copy.deepcopy(scorer.model)
    model.set_attn_implementation("eager")
    model = model.float().requires_grad_(True)
    names, parameters = zip(*model.named_parameters(), strict=True)
    at_a_time = max(1, ELEMENTS_AT_A_TIME // sum(p.numel() for p in parameters))
    random = torch.Generator().manual_seed(0)
    hashes = [sketch_of(p.numel(), random) for p in parameters]
    columns: list[list[Tensor]] = [[] for _ in names]
    for row in range(rows.num_rows):
        ids = torch.as_tensor(rows.input_ids[rows.row(row)], device=scorer.device)
        at = torch.as_tensor(np.flatnonzero(rows.sampled[rows.row(row)]), device=scorer.device)
        at = at[at > 0]
        images = () if rows.images is None else rows.images[row]
        given = image_inputs(replace(scorer, model=model), ids[None], images)
        logits = model(input_ids=ids[None], use_cache=False, **given).logits[0].float() / temperature
        logprobs = torch.log_softmax(logits, -1)[at - 1, ids[at]]
        for chunk in torch.eye(len(at), device=scorer.device).split(at_a_time):
            gradients = torch.autograd.grad(
                logprobs, parameters, chunk, retain_graph=True, is_grads_batched=True, allow_unused=True
            )
            for column, gradient, sketch in zip(columns, gradients, hashes, strict=True):
                column.append(sketched(torch.zeros(len(chunk), 1) if gradient is None else gradient, sketch))
    return {
        name: (jacobian := torch.cat(column).double()) @ jacobian.T * mean_square(parameter)
        for name, column, parameter in zip(names, columns, parameters, strict=True)
    }


def mean_square(parameter: Tensor) -> float:
    """Mean square of a tensor: tensors move by a share of their size."""
    return max(float((parameter.detach() ** 2).mean()), 1e-8)


def sketch_of(num_elements: int, random: torch.Generator) -> tuple[Tensor, Tensor] | None:
    if num_elements <= SKETCH:
        return None
    buckets = torch.randint(0, SKETCH, (num_elements,), generator=random)
    return buckets, torch.randint(0, 2, (num_elements,), generator=random) * 2.0 - 1.0


def sketched(gradient: Tensor, sketch: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return gradients [tokens, elements], hashed to fewer elements if they are many."""
    flat = gradient.reshape(len(gradient), -1).cpu()
    if sketch is None or flat.shape[1] == 1:
        return flat
    return torch.zeros(len(flat), SKETCH).index_add_(1, sketch[0], flat * sketch[1])


def evidence(kernel: Tensor, target: Tensor) -> tuple[float, float]:
    """Maximise the log likelihood of `target` under N(0, s K + v I) over s and v.

    Returns:
        The log likelihood up to a constant, in nats, and the square root of v.
    """
    values, vectors = torch.linalg.eigh(kernel)
    values, squares = values.clamp(min=0), (vectors.T @ target) ** 2
    found = []
    for scale in (0.0, *(SCALES / max(float(values.mean()), 1e-200))):
        shape = scale * values + 1
        variance = max(float((squares / shape).mean()), 1e-300)
        nats = -len(target) / 2 * np.log(variance) - 0.5 * float(shape.log().sum())
        found.append((float(nats), float(np.sqrt(variance))))
    return max(found)
