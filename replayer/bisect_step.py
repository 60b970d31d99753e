"""The first step after which two records hold other weights, by binary search over recorded checksums: nothing runs again.

Weights that have parted do not meet again, so log2(steps) pairs of outcomes are enough, whatever the length of the run. A batch that
differs without changing the weights is not looked for: `diff` reads every step.
"""

from collections.abc import Callable
from dataclasses import dataclass

from recorder import Record
from replayer.diff import DiffReport, diff_records
from replayer.errors import ReplayError


@dataclass(frozen=True)
class FirstStep:
    """`step` is the first common one after which weights differ, None when they never do; `last_same` the one before it.

    `num_read` steps of each record were read to find it.
    """

    step: int | None
    last_same: int | None
    num_read: int
    num_steps: int


def weights_differ(left: Record, right: Record, step: int) -> bool:
    """Whether any parameter has another checksum after the step. Raises StepNotRecorded for scope "rollout"."""
    here, there = (record.step(step).outcome(0).checksums for record in (left, right))
    return here != there


def first_true(count: int, holds: Callable[[int], bool]) -> int:
    """The first index below `count` at which `holds` is true, `count` where there is none; it stays true once it is."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def bisect_steps(left: Record, right: Record) -> FirstStep:
    """Finds the first step after which the weights differ.

    Raises ReplayError when the records have no step in common, StepNotRecorded when their scope has no checksums, DamagedRecord.
    """
    steps = sorted(set(left.steps) & set(right.steps))
    if not steps:
        raise ReplayError(f"{left.path} and {right.path} have no step in common: there is nothing to compare")
    read: list[int] = []

    def differs(index: int) -> bool:
        read.append(steps[index])
        return weights_differ(left, right, steps[index])

    # most records that are compared are the same to the end: that takes one look
    if not differs(len(steps) - 1):
        return FirstStep(None, steps[-1], len(read), len(steps))
    index = first_true(len(steps) - 1, differs)
    return FirstStep(steps[index], steps[index - 1] if index else None, len(read), len(steps))


def explain_step(left: Record, right: Record, found: FirstStep) -> DiffReport | None:
    """What differs in the step that was found, stage by stage."""
    return None if found.step is None else diff_records(left, right, found.step)
