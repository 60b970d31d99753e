"""Compare a step that TRL trains again with the recorded one, in the order of computation.

    prompts ─> batch ─> rewards ─> advantages ─> old log-probs ─> reference log-probs
            ─> [ order ─> log-probs ─> loss ] for each micro-batch
            ─> [ gradient norm ─> learning rate ─> weights ] for each optimizer step

Equal means equal bits. Only the first difference is wanted: later ones may follow from it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_debug.trl.observing import LossCall, TrainedStep
from areal_debug.trl.samples import CURRENT, OLD, REFERENCE
from recorder.trainers.sample import Sample

STAGES = (
    *("weights before the step", "prompts", "batch", "rewards", "advantages", "old log-probs"),
    *("reference log-probs", "order", "log-probs", "loss", "gradient norm", "learning rate", "weights"),
)


@dataclass(frozen=True)
class StepDifference:
    """The first difference of a step.

    Attributes:
        step: number in the record.
        optimizer_step: of TRL, counted from 0; the first of the step unless the stage is later.
        row, token: on the rank; None where the value is not that of a row or token.
        name: of the value, such as a reward function or a parameter.
        recorded, replayed: the values; None: there is none.
        rank: which process found it.
    """

    step: int
    optimizer_step: int
    stage: str
    row: int | None = None
    token: int | None = None
    name: str | None = None
    recorded: Any = None
    replayed: Any = None
    rank: int = 0

    def __str__(self) -> str:
        numbers = {"rank": self.rank or None, "row": self.row, "token": self.token}
        places = [f"{name} {number}" for name, number in numbers.items() if number is not None]
        where = ", ".join([f"step {self.step} (optimizer step {self.optimizer_step})", self.stage, *places])
        values = f"{self.recorded} in the record, {self.replayed} here"
        return f"{where}: {values}" if self.name is None else f"{where}: {self.name} is {values}"


@dataclass(frozen=True)
class Found:
    """A difference without its step: `values` are the recorded and the replayed one.

    `after` are the optimizer steps of the step before it.
    """

    stage: str
    values: tuple[Any, Any]
    name: str | None = None
    row: int | None = None
    token: int | None = None
    after: int = 0


def first_difference(
    samples: Sequence[Sample], details: Mapping[str, Any], step: TrainedStep, rank: int
) -> StepDifference | None:
    """Return the first difference of a step from its recorded samples and details."""
    found = next(differences(samples, details, step), None)
    if found is None:
        return None
    number = step.optimizer_step + found.after
    place = (found.row, found.token, found.name)
    return StepDifference(step.number, number, found.stage, *place, *found.values, rank)


def differences(samples: Sequence[Sample], details: Mapping[str, Any], step: TrainedStep) -> Iterator[Found]:
    """Yield the differences of a step."""
    if details["weights_before"] and step.weights_before:
        yield from of_weights("weights before the step", details["weights_before"], step.weights_before)
    if len(samples) != len(step.samples):
        yield Found("batch", (len(samples), len(step.samples)), "number of rows")
    rows = list(enumerate(zip(samples, step.samples, strict=False)))
    for row, (left, right) in rows:
        yield from of_tokens("batch", row, left.tokens, right.tokens)
        yield from of_tokens("batch", row, left.loss_mask, right.loss_mask, "loss mask")
    for row, (left, right) in rows:
        if repr(left.reward) != repr(right.reward):
            yield Found("rewards", (left.reward, right.reward), row=row)
    stages = {"advantages": "advantages", "old log-probs": OLD, "reference log-probs": REFERENCE}
    for stage, name in stages.items():
        if name != OLD or details["has_old_logps"]:
            for row, (left, right) in rows:
                yield from of_tokens(stage, row, left.learning.get(name), right.learning.get(name))
    yield from of_work(samples, details["work"], step, details["is_complete"])


def of_tokens(
    stage: str,
    row: int,
    left: np.ndarray | None,
    right: np.ndarray | None,
    name: str | None = None,
    after: int = 0,
) -> Iterator[Found]:
    """Yield the first token whose values, int32 or float32 [T], differ in their bits."""
    if left is None or right is None:
        if left is not right:
            known = ("absent" if left is None else "present", "absent" if right is None else "present")
            yield Found(stage, known, name, row, None, after)
        return
    if len(left) != len(right):
        yield Found(stage, (len(left), len(right)), "number of tokens", row, None, after)
    size = min(len(left), len(right))
    different = left[:size].view(np.int32) != right[:size].view(np.int32)
    if different.any():
        token = int(different.argmax())
        yield Found(stage, (left[token].item(), right[token].item()), name, row, token, after)


def of_weights(
    stage: str, left: Mapping[str, str], right: Mapping[str, str], after: int = 0
) -> Iterator[Found]:
    """Yield the first parameter whose checksums differ."""
    different = [name for name in {**left, **right} if left.get(name) != right.get(name)]
    for name in different[:1]:
        what = f"checksum of {name} ({len(different)} of {len(left)} parameters differ)"
        yield Found(stage, (left.get(name), right.get(name)), what, after=after)


def of_work(
    samples: Sequence[Sample], recorded: Sequence[Mapping[str, Any]], step: TrainedStep, is_complete: bool
) -> Iterator[Found]:
    after = 0
    for left, item in zip(recorded, step.work, strict=False):
        right = item.document()
        if left.keys() != right.keys():
            kinds = ("an optimizer step", "a micro-batch")
            yield Found("order", kinds if "lr" in left else kinds[::-1], "what follows", after=after)
            return
        if isinstance(item, LossCall):
            yield from of_loss(samples, step, left, right, after)
        else:
            yield from of_update(left, right, after)
            after += 1
    if is_complete and len(recorded) != len(step.work):
        name = "number of micro-batches and optimizer steps"
        yield Found("order", (len(recorded), len(step.work)), name, after=after)


def of_loss(
    samples: Sequence[Sample],
    step: TrainedStep,
    left: Mapping[str, Any],
    right: Mapping[str, Any],
    after: int,
) -> Iterator[Found]:
    """Yield the differences of a micro-batch in the loss, from the documents of both."""
    rows = left["rows"]
    if rows != right["rows"]:
        yield Found("order", (rows, right["rows"]), "rows of a micro-batch", after=after)
    for row, recorded, replayed in zip(rows, left["logps"], right["logps"], strict=False):
        if recorded != replayed:
            # values were kept of the first pass of a row only
            pair = samples[row].learning, step.samples[row].learning
            name = CURRENT if CURRENT in pair[0] else OLD
            yield from of_tokens("log-probs", row, pair[0].get(name), pair[1].get(name), None, after)
            yield Found("log-probs", (recorded, replayed), "checksum", row, None, after)
    if left["loss"] != right["loss"]:
        losses = (float.fromhex(left["loss"]), float.fromhex(right["loss"]))
        yield Found("loss", losses, f"that of rows {rows}", rows[0] if len(rows) == 1 else None, None, after)


def of_update(left: Mapping[str, Any], right: Mapping[str, Any], after: int) -> Iterator[Found]:
    if left["grad_norm"] != right["grad_norm"]:
        norms = (float.fromhex(left["grad_norm"]), float.fromhex(right["grad_norm"]))
        yield Found("gradient norm", norms, after=after)
    if left["lr"] != right["lr"]:
        yield Found("learning rate", (rates(left["lr"]), rates(right["lr"])), after=after)
    if left["weights"] and right["weights"]:
        yield from of_weights("weights", left["weights"], right["weights"], after)


def rates(texts: Sequence[str]) -> str:
    """Return the learning rates of the parameter groups, each once."""
    return ", ".join(str(float.fromhex(text)) for text in dict.fromkeys(texts))
