"""How often something happens in a run: by steps, by epochs, by seconds, or by whichever comes first."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Frequency:
    """Due after a step when one of the periods that are given has ended with it.

    Args:
        epochs, steps, seconds: the periods; None for one that does not count.
        steps_per_epoch: training steps in one pass over the data.
        agree: the largest of a number over all ranks, because clocks differ; a collective, called only if `seconds` is given.
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
        """Whether it is ever due."""
        return any((self.epochs, self.steps, self.seconds))

    def is_due(self, step: int) -> bool:
        """Whether it is due after `step` (from 0). A collective if `seconds` is given: ask on every rank, once a step."""
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
        """Seconds since it was last due, or since the run began."""
        return self.clock() - self._last

    def continue_after(self, elapsed_s: float) -> None:
        """Counts the seconds that had passed when a run was cut off."""
        self._last = self.clock() - elapsed_s
