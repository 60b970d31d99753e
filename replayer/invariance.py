"""Run one step in several layouts: its numbers must not change, and a factor names the bug.

    batch -> layouts: lists of micro-batches -> step function -> numbers, against those of one batch

How rows are divided, packed, ordered and padded decides how a step is computed, not what comes out. The
ratio of two numbers is looked up among the counts of the layouts: of 4 where one layout has 4
micro-batches and the other one, it is a mean where a sum belongs, or the other way.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise, product
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from areal_core.agent.transcript import without_transcripts
from areal_core.data.batch import RAGGED, Batch, pad_and_concat, select_rows
from areal_core.engine.determinism import rng_state, set_rng_state
from areal_core.engine.optimizer import gradient_norm
from areal_core.engine.ranks import Ranks
from areal_core.trainer.observed import Observer
from areal_core.trainer.rl import PPOTrainer
from recorder import Record, open_record
from replayer.compare.relations import count
from replayer.crosscheck.layouts import NO_COUNT, TOLERANCE, name_factor
from replayer.explain import objective_on
from replayer.preconditions import nearest_anchor, step_range
from replayer.request import Request, Summation
from replayer.run import replay_and_compare
from replayer.virtual_ranks import run_as_ranks

T = TypeVar("T")
# (micro-batches of one optimizer step) -> its numbers by name, such as loss and grad_norm
StepFunction = Callable[[list[Batch]], Mapping[str, float]]
ACCUMULATION = {"whole": 1, "accumulation 2": 2, "accumulation 4": 4}
ALONE = "rows alone"  # not packed into one sequence
LAYOUTS = (*ACCUMULATION, ALONE, "permuted rows", "more padding")
PADDING = 8  # columns
SCORES = ("prox_logp", "ref_logp", "teacher_logp")  # log-probs of actor, reference and teacher
QUARTERS = "accumulation 4"
OF_ADVANTAGES = "it is not computed from the rows of all ranks"
PACKED = "rows packed in one sequence may change each other"
SMALLEST = 1e-6  # a number is 0 below it
OF_16_BITS = 0.05  # the tolerance of compute in bfloat16 or float16


@dataclass(frozen=True)
class Variant:
    """A number that another layout gives; `named` says which count of the layouts the ratio is."""

    layout: str
    what: str
    expected: float
    found: float
    named: str

    def __str__(self) -> str:
        return f"{self.layout}: {self.what} is {self.found:.6g}, not {self.expected:.6g}: {self.named}"


def micro_batches_of(batch: Batch, layout: str) -> list[Batch]:
    """Return the micro-batches of a padded batch in one of `LAYOUTS`, some of them without rows.

    Raises:
        ValueError: the layout is unknown.
    """
    num_rows = len(batch["input_ids"])
    if layout == "permuted rows":
        return [chosen(batch, range(num_rows)[::-1])]
    if layout == "more padding":
        width = batch["input_ids"].shape[1]
        return [{key: padded(tensor, width) for key, tensor in batch.items()}]
    if layout == ALONE:
        return [chosen(batch, [row]) for row in range(num_rows)]
    if layout not in ACCUMULATION:
        raise ValueError(f"layout {layout!r} is unknown: it is one of {', '.join(LAYOUTS)}")
    number = ACCUMULATION[layout]
    bounds = [num_rows * i // number for i in range(number + 1)]
    return [chosen(batch, range(start, end)) for start, end in pairwise(bounds)]


def chosen(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return rows of a batch, with their padding where it has no pictures."""
    if RAGGED & batch.keys():
        return select_rows(batch, list(rows))
    return {key: tensor[list(rows)] for key, tensor in batch.items()}


def padded(tensor: Tensor, width: int) -> Tensor:
    if tensor.dim() < 2 or tensor.shape[1] != width:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(len(tensor), PADDING, *tensor.shape[2:])], 1)


def find_variants(
    step_function: StepFunction,
    batch: Batch,
    layouts: Sequence[str] = LAYOUTS,
    tolerance: float = TOLERANCE,
) -> list[Variant]:
    """Return the numbers that depend on the layout, compared with those of the whole batch.

    Args:
        step_function: computes loss and gradient of the micro-batches of one optimizer step, from
            the same weights in each call, and returns its numbers by name.
        batch: padded tensors [B, T], or [B], with `input_ids`.
        tolerance: relative to the expected number.
    """
    wholes = micro_batches_of(batch, "whole")
    expected, counts, found = dict(step_function(wholes)), counts_of(wholes), list[Variant]()
    for layout in layouts:
        parts = micro_batches_of(batch, layout)
        numbers = {} if layout == "whole" else step_function(parts)
        variants = differing(layout, expected, numbers, (counts, counts_of(parts)), tolerance)
        if layout in ACCUMULATION:
            variants = with_means(variants, "micro-batches", step_function, parts, tolerance)
        if layout == ALONE and all(one.named == NO_COUNT for one in found):
            variants = [
                replace(one, named=f"{one.named}: {PACKED}") if one.named == NO_COUNT else one
                for one in variants
            ]
        found += variants
    return found


def differing(
    layout: str,
    expected: Mapping[str, float],
    found: Mapping[str, float],
    counts: tuple[Mapping[str, float], Mapping[str, float]],
    tolerance: float,
) -> list[Variant]:
    """Return the numbers of a layout that are not those expected; `counts` are of the two layouts."""
    variants = []
    for what, value in found.items():
        want = expected[what]
        if not np.isclose(value, want, rtol=tolerance, atol=SMALLEST, equal_nan=True):
            named = name_factor(value / want if want else math.inf, *counts)
            variants.append(Variant(layout, what, want, float(value), named))
    return variants


def with_means(
    variants: list[Variant], of: str, step_function: StepFunction, parts: Sequence[Batch], tolerance: float
) -> list[Variant]:
    """Name those without a factor if one of them is the mean of what each part gives alone."""
    if all(one.named != NO_COUNT for one in variants):
        return variants
    with suppress(ZeroDivisionError):  # a part without a token in the loss has no mean
        alone = [step_function([part]) for part in parts]
        means = {one.what: np.mean([numbers[one.what] for numbers in alone]) for one in variants}
        if any(np.isclose(one.found, means[one.what], rtol=tolerance) for one in variants):
            named = f"a mean over the {of} of their own means"
            return [replace(one, named=named) if one.named == NO_COUNT else one for one in variants]
    return variants


def counts_of(micro_batches: Sequence[Batch], ranks: int = 1) -> dict[str, float]:
    """Return the counts of a layout that a wrong divisor may be."""
    rows = [len(batch["input_ids"]) for batch in micro_batches]
    found: dict[str, float] = {"micro-batches": sum(map(bool, rows)), "ranks": ranks}
    found["columns"] = micro_batches[0]["input_ids"].shape[1]
    if "prompt_id" in micro_batches[0]:
        groups = torch.cat([batch["prompt_id"] for batch in micro_batches])
        found["rows of a group"] = int(groups.unique(return_counts=True)[1].max())
    if "loss_mask" in micro_batches[0]:
        found["tokens of a row"] = float(sum(part["loss_mask"].sum() for part in micro_batches)) / sum(rows)
    return found


def assert_invariant(
    step_function: StepFunction,
    batch: Batch,
    layouts: Sequence[str] = LAYOUTS,
    tolerance: float = TOLERANCE,
) -> None:
    """Fail, with the factor, if a number of a step depends on how its rows are laid out.

    Arguments are those of `find_variants`.

    Raises:
        AssertionError: a number differs.
    """
    if found := find_variants(step_function, batch, layouts, tolerance):
        raise AssertionError("the step depends on its layout:\n" + "\n".join(f"  {one}" for one in found))


@dataclass
class StepLayouts:
    """What the minibatches of a recorded step gave in each layout."""

    record: str
    step: int
    layouts: tuple[str, ...]
    variants: list[tuple[int | None, Variant]]  # with the minibatch; None: before they are divided
    faithful: bool = True

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        rows = [{"minibatch": minibatch} | asdict(one) for minibatch, one in self.variants]
        return asdict(self) | {"variants": rows}


def run_layouts(
    folder: str, step: int, model: str | None = None, config: str | None = None, virtual: Summation = ""
) -> StepLayouts:
    """Replay up to a step and compute each of its minibatches in all layouts; a collective.

    `virtual` as in Request.
    """
    record = open_record(folder)
    step_range(record, step, step)
    of_ranks: list[StepLayouts] = []  # of each virtual rank of this process: all have the same

    def observer(record: Record, trainer: PPOTrainer, request: Request) -> Observer:
        names = [count(number, "rank") for number in numbers_of_ranks(trainer.ranks)]
        layouts = (names[0], *LAYOUTS[1:], *names[1:], *(f"{name} with {QUARTERS}" for name in names[1:]))
        found, batch = StepLayouts(folder, step, layouts, []), dict[str, Tensor]()
        of_ranks.append(found)

        def observe(event: str, **facts: Any) -> None:
            if event not in ("batch", "advantages", "gradients") or facts["step"] != step:
                return
            state = rng_state()
            if event == "batch":
                batch.update(without_transcripts(facts["batch"]))
            elif event == "advantages":
                found.variants += [(None, one) for one in advantages_of(trainer, batch, facts["inputs"])]
            else:
                found.variants += [(facts["minibatch"], one) for one in variants_of(trainer, facts)]
            set_rng_state(state)

        return observe

    request = Request(folder, nearest_anchor(record, step) or 0, step, model, config=config, virtual=virtual)
    is_faithful = replay_and_compare(request, [observer]).identical
    return replace(of_ranks[0], faithful=is_faithful)


def numbers_of_ranks(ranks: Ranks) -> tuple[int, ...]:
    """Return the numbers of data-parallel ranks that the processes can stand for."""
    size = ranks.process.data_parallel_size
    return (size, 2 * size) if ranks.model_parallel_size == 1 else (size,)


def on_ranks(trainer: PPOTrainer, number: int, compute: Callable[[Ranks], T]) -> T:
    """Return what a function gives as each of several ranks, all of them the same; a collective."""
    ranks, found = trainer.ranks, list[T]()
    if ranks.model_parallel_size > 1:  # processes that share rows stand for themselves
        return compute(ranks)

    def run() -> T:
        run_as_ranks(number, lambda config: ranks.process, lambda join: found.append(compute(join(None))))
        return found[0]

    return ranks.once(run)


def advantages_of(trainer: PPOTrainer, batch: Batch, inputs: Batch) -> list[Variant]:
    """Compute the advantages of a step on other ranks, from the log-probs that it has.

    Returns:
        The first token in the loss with another advantage, for each number of ranks.
    """
    known = {name: inputs[name] for name in (*SCORES, "entropy", "values") if name in inputs}
    known |= {"expected": inputs["advantages"], "in_loss": inputs["loss_mask"]}
    rows = pad_and_concat(trainer.ranks.gather_rows(batch | known))
    group = torch.unique(rows["prompt_id"], return_inverse=True)[1]
    expected, is_trained = rows["expected"], rows["in_loss"].bool()
    # what the models gave is among the rows
    scorers: dict[str, Any] = {
        name: SimpleNamespace(compute_logprobs=itemgetter(name), score=itemgetter(name, "entropy"))
        for name in SCORES
        if name in rows
    }
    actor, reference, teacher = (scorers.get(name, cast(Any, None)) for name in SCORES)

    def compute(ranks: Ranks) -> Tensor:
        own = (group % ranks.data_parallel_size == ranks.data_parallel_rank).nonzero()[:, 0].tolist()
        part, objective = chosen(rows, own), objective_on(ranks, trainer)
        given: Any = {"values": part.get("values"), "teacher": teacher}
        learned = objective.learning_inputs(part, actor, reference, trainer.version, **given)
        found = torch.zeros_like(expected)
        for places, values in ranks.gather_rows((own, learned["advantages"])):
            found[places, : values.shape[1]] = values
        return found

    variants = []
    for number in numbers_of_ranks(trainer.ranks):
        found = on_ranks(trainer, number, compute)
        same = torch.isclose(found, expected, rtol=TOLERANCE, atol=1e-5, equal_nan=True)
        for row, token in (~same & is_trained).nonzero()[:1].tolist():
            what = f"advantage of prompt {rows['prompt_id'][row]}, sample {rows['sample_id'][row]}, token {token + 1}"
            pair = float(expected[row, token]), float(found[row, token])
            variants.append(Variant(count(number, "rank"), what, *pair, OF_ADVANTAGES))
    return variants


def variants_of(trainer: PPOTrainer, facts: Mapping[str, Any]) -> list[Variant]:
    """Compute a minibatch of this trainer in all layouts; its gradients stay as they are."""
    parameters = [p for p in trainer.actor.model.parameters() if p.grad is not None]
    kept, state = [p.grad for p in parameters], rng_state()
    trained = float(trainer.ranks.once(partial(gradient_norm, parameters, trainer.ranks)))
    tolerance = TOLERANCE if trainer.actor.dtype == torch.float32 else OF_16_BITS
    rows = pad_and_concat(trainer.ranks.gather_rows(facts["batch"]))

    def compute(parts: list[Batch], ranks: Ranks) -> dict[str, float]:
        set_rng_state(state)
        engine, objective = replace(trainer.actor, ranks=ranks), objective_on(ranks, trainer)
        own = slice(ranks.data_parallel_rank, None, ranks.data_parallel_size)
        micro_batches = [chosen(part, range(len(part["input_ids"]))[own]) for part in parts]
        weight = ranks.sum(sum(map(objective.denominator, micro_batches)).double())  # type: ignore[union-attr]
        total = float(weight) or math.nan  # no token is in the loss
        given = [(part, range(len(part["input_ids"]))) for part in micro_batches]
        results = engine.gradients(given, objective.loss, objective.denominator, total)
        losses = [result.loss for result in results]
        loss = float(ranks.sum(torch.stack(losses).double().sum())) / total
        return {"loss": loss, "grad_norm": float(ranks.once(partial(gradient_norm, parameters, ranks)))}

    def step_on(number: int, parts: list[Batch]) -> dict[str, float]:
        return on_ranks(trainer, number, partial(compute, parts))

    size, *more = numbers_of_ranks(trainer.ranks)
    step, counts = partial(step_on, size), counts_of([rows], size)
    num_divided, num_ranks = len(trainer.actor.divide(facts["batch"])), trainer.ranks.data_parallel_size
    counts_trained = counts | {"micro-batches": num_divided, "ranks": num_ranks}
    whole = step([rows])
    found = differing("as trained", whole, {"grad_norm": trained}, (counts, counts_trained), tolerance)
    found += find_variants(step, rows, tolerance=tolerance)
    for number, layout in product(more, ("whole", QUARTERS)):
        parts = micro_batches_of(rows, layout)
        name = count(number, "rank") + (f" with {layout}" if layout == QUARTERS else "")
        others = counts_of(parts, number)
        variants = differing(name, whole, step_on(number, parts), (counts, others), tolerance)
        if size == 1:
            own = [chosen(rows, range(len(rows["input_ids"]))[rank::number]) for rank in range(number)]
            variants = with_means(variants, "ranks", step, own, tolerance)
        found += variants
    for parameter, gradient in zip(parameters, kept, strict=True):
        parameter.grad = gradient
    return found
