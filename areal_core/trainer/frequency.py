"""Periods of a run: every so many steps, epochs or seconds, whichever comes first."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Frequency:
    """A timer that is due after a step if one of its periods has ended.

    Args:
        epochs, steps, seconds: the periods; None for an unused one.
        steps_per_epoch: training steps in one pass over the data.
        agree: returns the maximum of a number over all ranks, because clocks differ; a collective,
            called only if `seconds` is set.
        clock: returns seconds.
    """

    epochs: int | None
    steps: int | None
    seconds: float | None
    steps_per_epoch: int
    agree: Callable[[int], int] = lambda number: number
    clock: Callable[[], float] = time.monotonic
    _last: float = field(init=False)

    def __post_init__(self) -> None:
        self._last = self.clock()

    @property
    def is_set(self) -> bool:
        """Whether any period is set: without one the timer is never due."""
        return any((self.epochs, self.steps, self.seconds))

    def is_due(self, step: int) -> bool:
        """Return whether the timer is due after `step` (from 0).

        A collective if `seconds` is set: call it on every rank, once per step.
        """
        done = step + 1
        due = bool(self.steps and done % self.steps == 0)
        due = due or bool(self.epochs and done % (self.epochs * self.steps_per_epoch) == 0)
        if self.seconds:
            late = self.agree(int(self.clock() - self._last >= self.seconds))
            due = due or bool(late)
        if due:
            self._last = self.clock()
        return due

    def elapsed_s(self) -> float:
        """Return the seconds since the timer was last due, or since the start of the run."""
        return self.clock() - self._last

    def continue_after(self, elapsed_s: float) -> None:
        """Continue from the `elapsed_s` of an interrupted run."""
        self._last = self.clock() - elapsed_s
