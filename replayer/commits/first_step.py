"""Find by binary search the first step after which the weights of two records differ.

Weights that have diverged do not become equal again, so log2(steps) pairs of outcomes find the
first step with other weights. A batch that differs without changing the weights is not found:
`why --all` reads every step.
"""

from bisect import bisect_left
from dataclasses import dataclass

from recorder import Record
from recorder.verify import check_step
from replayer.diff import common_steps
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


def bisect_steps(left: Record, right: Record, fast: bool = False) -> FirstStep:
    """Find the first step after which the weights differ, by binary search over common steps.

    If they never do, every byte of these steps is read and checked, unless `fast`.

    Raises:
        ReplayError: the records have no step in common, or one of another trainer has no checksums.
        StepNotRecorded: the scope of one has no checksums.
        DamagedRecord: bytes differ from those written.
    """
    steps = common_steps(left, right)
    for record in (left, right):
        check_checksums(record, steps[-1])
    read: list[int] = []

    def differs(step: int) -> bool:
        read.append(step)
        here, there = (record.step(step).outcome(0).checksums for record in (left, right))
        return here != there

    # most compared records are equal to the end, which needs one comparison
    if not differs(steps[-1]):
        for record in () if fast else (left, right):
            for step in steps:
                check_step(record, step)
        return FirstStep(None, steps[-1], len(read), len(steps))
    index = bisect_left(steps[:-1], True, key=differs)
    return FirstStep(steps[index], steps[index - 1] if index else None, len(read), len(steps))
