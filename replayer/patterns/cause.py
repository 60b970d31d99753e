"""Which of the first stage's differences the others follow from, and whether weights are equal."""

import re

from recorder import RecordedStep
from replayer.stages import StageDifference, read_outcomes

# facts of an update in the order of their computation: parameters precede the norm of gradients
FACTS = (r"rows of", r"num_tokens of", r"weight of", r"loss of", r"lr\b", r"(?!grad_norm)", r"grad_norm")


def causal_tensor(differences: tuple[StageDifference, ...]) -> StageDifference:
    """Return the difference of the first stage that its others follow from.

    `differences` are those of `compare_steps`, at least one.
    """
    first = differences[0]
    same_stage = [d for d in differences if (d.stage, d.minibatch) == (first.stage, first.minibatch)]
    return min(same_stage, key=order_of)


def order_of(difference: StageDifference) -> int:
    if difference.stage in ("batch", "logprobs", "advantages"):  # listed in the order of computation
        return 0
    return next(number for number, fact in enumerate(FACTS) if re.match(fact, difference.name))


def same_weights(left: RecordedStep, right: RecordedStep) -> bool | None:
    """Return whether both recordings of a step end with the same weights, by their checksums.

    None if one of them has none.
    """
    here, there = read_outcomes(left), read_outcomes(right)
    if not here or not there or not here[0].checksums or not there[0].checksums:
        return None
    return here[0].checksums == there[0].checksums
