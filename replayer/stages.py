"""Find where two recordings of one step diverge, by its stages in the order of computation.

    batch ─> logprobs ─> advantages ─> [ loss ─> gradient ─> weights ] for each minibatch, a critic's after the actor's

The first difference in this order is the one to explain; later ones may follow from it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from recorder import MicroBatch, Outcome, Plan, RecordedStep
from replayer.tensors_apart import StageDifference, compare_tensors, files

STAGES = ("batch", "logprobs", "advantages", "loss", "gradient", "weights")
ACTOR, UPDATE = "ppo_actor/", "ppo_actor/update/"


@dataclass(frozen=True)
class Update:
    """An optimizer step in the trainer's plan; the loss is that of all ranks."""

    loss: float
    grad_norm: float
    lr: float


def compare_steps(left: RecordedStep, right: RecordedStep) -> tuple[StageDifference, ...]:
    """List all differences of two recordings of a step, in the order of computation.

    Raises DamagedRecord.
    """
    batch = list(compare_tensors(left, right, "batch"))
    learning = list(compare_tensors(left, right, "learning"))
    learning.sort(key=lambda difference: STAGES.index(difference.stage))
    here, there = read_outcomes(left), read_outcomes(right)
    if not here or not there:
        return (*batch, *learning)
    if not files(left, "learning") or not files(right, "learning"):
        learning = list(compare_statistics(here[0].stats, there[0].stats))
    plans = left.plan(0), right.plan(0)
    actors = compare_updates(here, there, *(parse_updates(plan, "minibatches") for plan in plans))
    critics = compare_critics(*(parse_updates(plan, "critic") for plan in plans))
    weights = compare_checksums("weights", here[0].checksums, there[0].checksums)
    return (*batch, *learning, *actors, *critics, *weights)


def read_outcomes(step: RecordedStep) -> list[Outcome]:
    """Read the outcome of each rank; empty if outcomes were not recorded."""
    recorded = step.rank_name("outcome", 0, "json") in step.manifest.files
    return [step.outcome(rank) for rank in range(step.manifest.num_ranks)] if recorded else []


def parse_updates(plan: Plan, member: str) -> list[Update]:
    """Parse the optimizer steps in the plan's `member`: "minibatches" (actor) or "critic".

    Empty if the member is absent.
    """
    if member not in plan.details:
        return []
    numbers = ("loss", "grad_norm", "lr")
    return [Update(*(float.fromhex(item[name]) for name in numbers)) for item in plan.details[member]]


def compare_statistics(left: Mapping[str, float], right: Mapping[str, float]) -> Iterator[StageDifference]:
    """Compare statistics of the inputs to the loss, if the inputs were not recorded."""
    names = [
        name for name in left if name in right and name.startswith(ACTOR) and not name.startswith(UPDATE)
    ]
    for name in names:
        yield from compare_numbers("advantages", f"statistic {name}", left[name], right[name])


def compare_numbers(
    stage: str, name: str, left: float | None, right: float | None, minibatch: int | None = None
) -> Iterator[StageDifference]:
    """Yield the difference of two numbers, if their bits differ."""
    if (left is None) != (right is None) or (
        left is not None and right is not None and hex_of(left) != hex_of(right)
    ):
        largest = None if left is None or right is None else abs(left - right)
        yield StageDifference(stage, name, left, right, largest=largest, minibatch=minibatch)


def hex_of(value: float) -> str:
    """Return C99 hex: equal text means equal bits."""
    return float(value).hex()


def compare_updates(
    here: Sequence[Outcome], there: Sequence[Outcome], updates: Sequence[Update], others: Sequence[Update]
) -> Iterator[StageDifference]:
    """Compare losses, gradients and weights, minibatch by minibatch."""
    ran = [m.minibatch + 1 for outcome in (*here, *there) for m in outcome.micro_batches]
    for minibatch in range(max([0, *ran])):
        # other ranks have other micro-batches, whose losses cannot be compared
        if len(here) == len(there):
            for rank, (left, right) in enumerate(zip(here, there, strict=True)):
                yield from compare_losses(rank, minibatch, left, right)
        own, other = (u[minibatch] if minibatch < len(u) else None for u in (updates, others))
        if own and other:
            yield from compare_numbers("gradient", "grad_norm", own.grad_norm, other.grad_norm, minibatch)
        recorded = zip(here[0].minibatches[minibatch:], there[0].minibatches[minibatch:], strict=False)
        pair = next(recorded, None)
        if pair:
            yield from compare_checksums("gradient", pair[0].gradients, pair[1].gradients, minibatch)
        if own and other:
            yield from compare_numbers("weights", "lr", own.lr, other.lr, minibatch)
        if pair:
            yield from compare_checksums("weights", pair[0].weights, pair[1].weights, minibatch)


def compare_critics(updates: Sequence[Update], others: Sequence[Update]) -> Iterator[StageDifference]:
    """Compare losses, gradient norms and learning rates of a critic, by minibatch."""
    for minibatch, (left, right) in enumerate(zip_longest(updates, others)):
        for stage, fact in (("loss", "loss"), ("gradient", "grad_norm"), ("weights", "lr")):
            own, other = (None if one is None else getattr(one, fact) for one in (left, right))
            yield from compare_numbers(stage, f"{fact} of the critic", own, other, minibatch)


def compare_losses(rank: int, minibatch: int, left: Outcome, right: Outcome) -> Iterator[StageDifference]:
    """Compare how a rank divided a minibatch, and the loss of each micro-batch."""
    sides = [[m for m in outcome.micro_batches if m.minibatch == minibatch] for outcome in (left, right)]
    for number, (a, b) in enumerate(zip_longest(*sides)):
        name = f"rank {rank}, micro-batch {number}"
        rows, other_rows = (None if one is None else one.rows for one in (a, b))
        if rows != other_rows:
            yield StageDifference("loss", f"rows of {name}", rows, other_rows, minibatch=minibatch)
        for fact in ("num_tokens", "weight", "loss"):
            numbers = number_of(a, fact), number_of(b, fact)
            yield from compare_numbers("loss", f"{fact} of {name}", *numbers, minibatch)


def number_of(micro_batch: MicroBatch | None, fact: str) -> float | None:
    """One number of a micro-batch, None if there is no such micro-batch."""
    return None if micro_batch is None else getattr(micro_batch, fact)


def compare_checksums(
    stage: str, left: Mapping[str, str], right: Mapping[str, str], minibatch: int | None = None
) -> Iterator[StageDifference]:
    """Yield the first parameter, in the model's order, whose checksum differs, and how many do."""
    names = list({**left, **right})
    different = [name for name in names if name not in left or name not in right or left[name] != right[name]]
    if different:
        sides = [({different[0]: None} | dict(side))[different[0]] for side in (left, right)]
        yield StageDifference(
            stage, different[0], sides[0], sides[1], len(different), len(names), minibatch=minibatch
        )
