"""Find by binary search the first step after which the weights of two records differ.

Weights that have diverged do not become equal again, so log2(steps) pairs of outcomes find the
first step with other weights. A batch that differs without changing the weights is not found:
`why --all` reads every step.
"""

from collections.abc import Callable
from dataclasses import dataclass

from recorder import Record
from recorder.verify import check_step
from replayer.diff import DiffReport, diff_records
from replayer.errors import ReplayError
from replayer.preconditions import check_checksums


@dataclass(frozen=True)
class FirstStep:
    """Result of `bisect_steps`.

    Attributes:
        step: the first common step after which weights differ, None if they never do.
        last_same: the common step before it.
        num_read: steps of each record that were read.
        num_steps: steps that both records have.
    """

    step: int | None
    last_same: int | None
    num_read: int
    num_steps: int


def first_true(count: int, holds: Callable[[int], bool]) -> int:
    """Return the first index with monotonic `holds` true, `count` if there is none."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def bisect_steps(left: Record, right: Record, fast: bool = False) -> FirstStep:
    """Find the first step after which the weights differ, by binary search over common steps.

    If they never do, every byte of these steps is read and checked, unless `fast`.

    Raises:
        ReplayError: the records have no step in common, or one of another trainer has no checksums.
        StepNotRecorded: the scope of one has no checksums.
        DamagedRecord: bytes differ from those written.
    """
    steps = sorted(set(left.steps) & set(right.steps))
    if not steps:
        raise ReplayError(f"{left.path} and {right.path} have no step in common: there is nothing to compare")
    for record in (left, right):
        check_checksums(record, steps[-1])
    read: list[int] = []

    def differs(index: int) -> bool:
        read.append(steps[index])
        here, there = (record.step(steps[index]).outcome(0).checksums for record in (left, right))
        return here != there

    # most compared records are equal to the end, which needs one comparison
    if not differs(len(steps) - 1):
        for record in () if fast else (left, right):
            for step in steps:
                check_step(record, step)
        return FirstStep(None, steps[-1], len(read), len(steps))
    index = first_true(len(steps) - 1, differs)
    return FirstStep(steps[index], steps[index - 1] if index else None, len(read), len(steps))


def explain_step(left: Record, right: Record, found: FirstStep) -> DiffReport | None:
    """Compare the step that was found, stage by stage."""
    return None if found.step is None else diff_records(left, right, found.step)
