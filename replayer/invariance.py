"""Run one step in several layouts: its numbers must not change, and a factor names the bug.

    batch -> layouts: lists of micro-batches -> step function -> numbers, against those of one batch

How rows are divided, packed, ordered and padded decides how a step is computed, not what comes out. The
ratio of two numbers is looked up among the counts of the layouts: of 4 where one layout has 4
micro-batches and the other one, it is a mean where a sum belongs, or the other way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_core.data.batch import RAGGED, Batch, select_rows
from areal_core.engine.determinism import rng_state, set_rng_state
from areal_core.engine.optimizer import gradient_norm
from areal_core.telemetry.stats import Stats
from areal_core.trainer.observed import Observer
from areal_core.trainer.rl import PPOTrainer
from recorder import Record, open_record
from replayer.preconditions import nearest_anchor, step_range
from replayer.request import Request, Summation
from replayer.run import replay_and_compare

# (micro-batches of one optimizer step) -> its numbers by name, such as loss and grad_norm
StepFunction = Callable[[list[Batch]], Mapping[str, float]]
ACCUMULATION = {"whole": 1, "accumulation 2": 2, "accumulation 4": 4}
ALONE = "rows alone"  # not packed into one sequence
LAYOUTS = (*ACCUMULATION, ALONE, "permuted rows", "more padding")
PADDING = 8  # columns
TOLERANCE = 1e-3  # of a value: float32 sums in another order differ by less, bfloat16 by more
NO_COUNT = "no count of the layouts"
OF_WHOLE = 0.01  # of a factor, that a count may be off
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
    count = len(batch["input_ids"])
    if layout == "permuted rows":
        return [chosen(batch, range(count)[::-1])]
    if layout == "more padding":
        width = batch["input_ids"].shape[1]
        return [{key: padded(tensor, width) for key, tensor in batch.items()}]
    if layout == ALONE:
        return [chosen(batch, [row]) for row in range(count)]
    if layout not in ACCUMULATION:
        raise ValueError(f"layout {layout!r} is unknown: it is one of {', '.join(LAYOUTS)}")
    number = ACCUMULATION[layout]
    bounds = [count * i // number for i in range(number + 1)]
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
    expected, found = dict(step_function(wholes)), []
    for layout in layouts:
        micro_batches = micro_batches_of(batch, layout)
        for what, value in ({} if layout == "whole" else step_function(micro_batches)).items():
            want = expected[what]
            if not np.isclose(value, want, rtol=tolerance, atol=SMALLEST, equal_nan=True):
                ratio = value / want if want else float("inf")
                named = name_factor(ratio, counts_of(wholes), counts_of(micro_batches))
                if layout == ALONE and named == NO_COUNT:
                    named += ": rows packed in one sequence change each other"
                found.append(Variant(layout, what, want, float(value), named))
    return found


def name_factor(ratio: float, one: Mapping[str, float], other: Mapping[str, float]) -> str:
    """Say which count of the layouts, all above 0, a ratio is."""
    ratios = {name: other[name] / one[name] for name in one if one[name] != other[name]}
    factors = {f"the {name}": ratio for name, ratio in ratios.items()}
    factors |= {f"the {a} times the {b}": x * y for (a, x), (b, y) in combinations(ratios.items(), 2)}
    factors |= {f"the square root of the {name}": ratio**0.5 for name, ratio in ratios.items()}
    for name, factor in factors.items():
        for value, verb in ((factor, "multiplied by"), (1 / factor, "divided by")):
            if factor != 1 and abs(ratio / value - 1) < OF_WHOLE:
                return f"{verb} {name}"
    return NO_COUNT


def counts_of(micro_batches: Sequence[Batch]) -> dict[str, float]:
    """Return the counts of a layout that a wrong divisor may be."""
    rows = [len(batch["input_ids"]) for batch in micro_batches]
    return {
        "micro-batches": sum(map(bool, rows)),
        "columns": micro_batches[0]["input_ids"].shape[1],
    }


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
    variants: list[tuple[int, Variant]]  # with the minibatch
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
        found = StepLayouts(folder, step, LAYOUTS, [])
        of_ranks.append(found)

        def observe(event: str, **facts: Any) -> None:
            if event == "gradients" and facts["step"] == step:
                state = rng_state()
                found.variants += [(facts["minibatch"], one) for one in variants_of(trainer, facts)]
                set_rng_state(state)

        return observe

    start = nearest_anchor(record, step) or 0
    request = Request(folder, start, step, model, config=config, virtual=virtual)
    is_faithful = replay_and_compare(request, [observer]).identical
    return replace(of_ranks[0], faithful=is_faithful)


def variants_of(trainer: PPOTrainer, facts: Mapping[str, Any]) -> list[Variant]:
    """Compute a minibatch of this trainer in all layouts; its gradients stay as they are."""
    engine, ranks = trainer.actor, trainer.ranks
    objective = replace(trainer.objective, stats=Stats(ranks.is_group_leader, ranks.gather_objects))
    parameters = [p for p in engine.model.parameters() if p.grad is not None]
    kept, state = [p.grad for p in parameters], rng_state()
    norm = partial(gradient_norm, parameters, ranks)
    trained = float(ranks.once(norm))
    norms: list[float] = []

    def compute(micro_batches: list[Batch]) -> dict[str, float]:
        set_rng_state(state)
        total = float(ranks.sum(sum(map(objective.denominator, micro_batches)).double()))  # type: ignore[union-attr]
        # Each is a collective: a rank with fewer rows computes empty ones.
        empty = [chosen(batch, [])] * (ranks.maximum(len(micro_batches)) - len(micro_batches))
        parts = [(part, range(len(part["input_ids"]))) for part in [*micro_batches, *empty]]
        results = engine.gradients(parts, objective.loss, objective.denominator, total)
        losses = [result.loss for result in results]
        loss = float(ranks.sum(torch.stack(losses).double().sum())) / total
        norms.append(float(ranks.once(norm)))
        return {"loss": loss, "grad_norm": norms[-1]}

    batch, tolerance = facts["batch"], TOLERANCE if engine.dtype == torch.float32 else OF_16_BITS
    found = find_variants(compute, batch, tolerance=tolerance)
    if not np.isclose(trained, norms[0], rtol=tolerance, atol=SMALLEST, equal_nan=True):
        counts = [counts_of([chosen(batch, rows) for rows in groups]) for groups in
                  ([range(len(batch["input_ids"]))], engine.divide(batch))]  # fmt: skip
        named = name_factor(trained / norms[0] if norms[0] else float("inf"), *counts)
        found.insert(0, Variant("as trained", "grad_norm", norms[0], trained, named))
    objective.stats.export()  # a collective
    for parameter, gradient in zip(parameters, kept, strict=True):
        parameter.grad = gradient
    return found
