"""Data-parallel ranks of a job that take turns in fewer processes, as threads.

    process m of M, for a job of N ranks        thread j is rank j * M + m
      rank m        runs to its next collective, waits ─┐
      rank M + m    runs to its next collective, waits ─┤
      ...                                               └─> the last one combines the values of
                                                            all threads and processes, and gives
                                                            the turn to the first

Only the thread that has the turn runs; it gives it to the next one when it reaches a collective or
its end. Rank m is the main thread, which gets Ctrl-C. An error of one ends all of them, so none
waits for a turn that never comes.

Consecutive ranks are in different processes. So a sum over the processes, continued from turn to
turn, adds in the order of the ranks, whatever the number of processes. Sums of a run that left
their order to gloo are taken in gloo's order (`gloo_order.py`).
"""

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from areal_core.engine.determinism import rng_state, set_rng_state
from areal_core.engine.gloo_order import sum_as_gloo
from areal_core.engine.ranks import Ranks, sum_in_order
from areal_core.engine.reduction import GradientSum
from areal_core.errors import RanksError

T = TypeVar("T")


class OtherRankFailed(Exception):
    """Ends a thread because another one has failed."""


class Turns:
    """The threads of a process, of which one runs at a time.

    Each has its own random numbers and, where it has redirected them, standard streams.
    """

    def __init__(self, size: int) -> None:
        self.size, self.current = size, 0
        self.changed = threading.Condition()
        self.errors: list[BaseException] = []
        self.values: list[Any] = [None] * size
        self.rng: list[dict[str, str] | None] = [None] * size
        self.streams = [(sys.stdout, sys.stderr)] * size
        self.result: Any = None

    def run(self, work: Callable[[int], None]) -> None:
        """Run `work(number)` in each thread; raises the first error of one."""
        others = range(1, self.size)
        threads = [threading.Thread(target=self._run, args=(work, n), daemon=True) for n in others]
        for thread in threads:
            thread.start()
        self._run(work, 0)
        for thread in threads:
            while thread.is_alive():
                thread.join(1.0)  # in parts, so that Ctrl-C ends the wait
        if self.errors:
            raise self.errors[0]

    def meet(self, number: int, value: Any, combine: Callable[[list[Any]], T]) -> T:
        """Wait for all threads, and return `combine` of their values, which is called once."""
        self.values[number] = value
        if number == self.size - 1:
            self.result = combine(list(self.values))
        self._pass_on(number)
        self._wait(number)
        found: T = self.result
        return found

    def _run(self, work: Callable[[int], None], number: int) -> None:
        try:
            self._wait(number)
            work(number)
        except OtherRankFailed:
            pass
        except BaseException as error:
            with self.changed:
                self.errors.append(error)
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        self.rng[number], self.streams[number] = rng_state(), (sys.stdout, sys.stderr)
        with self.changed:
            self.current = (number + 1) % self.size
            self.changed.notify_all()

    def _wait(self, number: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.current == number or self.errors)
            if self.errors:
                raise OtherRankFailed
        if (states := self.rng[number]) is not None:
            set_rng_state(states)
        sys.stdout, sys.stderr = self.streams[number]


@dataclass(frozen=True, kw_only=True)
class VirtualRanks(Ranks):
    """Rank `rank` of a job of `world_size` data-parallel ranks, which is a thread of a process.

    Args:
        real: this process in the job that runs.
        turns, number: the threads, and which of them this one is.
        sums: of gradients, shared by the threads.
        in_gloos_order: see `sums_as_gloo`.
    """

    real: Ranks
    turns: Turns
    number: int
    sums: GradientSum
    in_gloos_order: bool = False

    @property
    def sums_as_gloo(self) -> bool:
        """True where sums are taken in gloo's order, not in that of the ranks."""
        return self.in_gloos_order

    @property
    def is_virtual(self) -> bool:
        """True: several ranks share this process."""
        return True

    @property
    def has_turn(self) -> bool:
        """True unless another virtual rank of this process computes."""
        return self.turns.current == self.number

    @property
    def process(self) -> Ranks:
        """This process in the job that runs."""
        return self.real

    @property
    def num_summed(self) -> int:
        """Number of ranks that gradients are summed over."""
        return self.world_size

    def once(self, compute: Callable[[], T]) -> T:
        """Call a function once in this process, and return its result to every thread."""
        return self.turns.meet(self.number, None, lambda _: compute())

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's value, in rank order; a collective."""

        def combine(values: list[T]) -> list[T]:
            of_processes = self.real.gather_objects(values)
            return [
                of_processes[r % len(of_processes)][r // len(of_processes)] for r in range(self.world_size)
            ]

        return self.turns.meet(self.number, value, combine)

    def gather_rows(self, value: T) -> list[T]:
        """Return the values of the data-parallel ranks, in order; a collective."""
        return self.gather_objects(value)

    def maximum(self, count: int) -> int:
        """Return the maximum of a count over ranks; a collective."""
        return max(self.gather_objects(count))

    def barrier(self) -> None:
        """Wait for every rank; a collective."""
        self.once(self.real.barrier)

    def leave(self) -> None:
        """Do nothing: other ranks may still need the process group."""

    def begin_sum(self, model: nn.Module) -> None:
        """Start the sum of gradients over ranks; a collective."""
        self.once(lambda: self.sums.begin(model, self.real.rank, self.real.world_size))

    def next_in_sum(self, model: nn.Module) -> None:
        """Prepare for the gradients of this rank."""
        self.sums.next(model, self.real.world_size)

    def end_sum(self, model: nn.Module) -> None:
        """Add the sum of all ranks to the gradients so far; a collective."""
        self.once(lambda: self.sums.end(model))

    def sum_parts(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over processes, each of which has a part of the model; a collective."""
        return self.once(lambda: self.real.sum_parts(tensor))

    def _sum(self, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        parts = self.gather_objects(tensor)
        return sum_as_gloo(parts) if self.sums_as_gloo else sum_in_order(parts)


def run_as_ranks(
    num_ranks: int,
    join: Callable[[Any], Ranks],
    work: Callable[[Callable[[Any], Ranks]], None],
    as_gloo: bool = False,
) -> None:
    """Run `work` as each rank of a job of `num_ranks` that this process stands for; a collective.

    Args:
        join: joins the job that runs, by its config: called once.
        work: gets the function to join with in place of that.
        as_gloo: sum over ranks in gloo's order, not in that of the ranks.

    Raises:
        RanksError: the processes do not divide the ranks.
        Exception: of `work`.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks % size:
        raise RanksError(
            f"{size} processes cannot compute the shares of {num_ranks} ranks equally: give a divisor of that number"
        )
    turns, sums = Turns(num_ranks // size), GradientSum(num_ranks, as_gloo)

    def of_thread(number: int) -> None:
        def join_as_rank(config: Any) -> Ranks:
            real = turns.meet(number, None, lambda _: join(config))
            rank = number * real.world_size + real.rank
            return VirtualRanks(
                rank,
                num_ranks,
                real.device,
                real.meshes,
                real=real,
                turns=turns,
                number=number,
                sums=sums,
                in_gloos_order=as_gloo,
            )

        work(join_as_rank)

    turns.run(of_thread)
