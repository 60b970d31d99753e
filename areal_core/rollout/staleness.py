"""How many prompts may be on their way, and which of the finished ones the trainer takes: arithmetic, no threads.

A prompt that starts at version `s` may be consumed at version `s + max_head_offpolicyness` at the latest. Two rules keep that, and
no sample has to be thrown away for it:

* **Start**: until version `v` no more than `(max_head_offpolicyness + v + 1) * batch_size` prompts are accepted or running in all, and
  no more than `(max_head_offpolicyness + 1) * batch_size` of them are not consumed yet (which says the same, unless a version moved
  without a batch). So what is out always fits into the batches that are still in time.
* **Take**: the oldest finished prompts, unless those left behind would then no longer fit into the batches they are in time for: then
  the trainer waits for one of them. (To take whatever is finished lets a long episode age without a bound.)
"""

from collections.abc import Sequence
from dataclasses import dataclass


def per_rank(total: int, num_ranks: int) -> int:
    """A rank's share of a limit; at least 1, because a share of 0 would let nothing start for ever."""
    return max(1, total // num_ranks)


@dataclass
class StalenessControl:
    """The counts of one data-parallel rank. The unit is the prompt with all its samples.

    Args:
        batch_size: prompts that the trainer takes from this rank per version.
        max_concurrent: most prompts at work at a time.
        max_head_offpolicyness: versions that the trainer may be ahead of a sample's oldest token.
        num_steps: version at which training ends; what no step would take is not started. None: unknown.
    """

    batch_size: int
    max_concurrent: int
    max_head_offpolicyness: int = 0
    num_steps: int | None = None
    version: int = 0
    accepted: int = 0  # since the run began, consumed ones included; a stale one is taken off again
    held: int = 0  # rejected, and keeping their place in a batch, which is then smaller
    consumed: int = 0
    running: int = 0
    rejected: int = 0
    failed: int = 0
    stale: int = 0  # finished, but too old: only when versions move without a batch being taken

    def capacity(self) -> int:
        """How many prompts may start now; negative when more are out than the limits allow."""
        room = self.max_concurrent - self.running
        return min(room, self.staleness_limit() - (self.accepted + self.held + self.running))

    def staleness_limit(self) -> int:
        """How many prompts may have been accepted, be held or be running by now."""
        ahead = self.max_head_offpolicyness + 1
        limits = [(ahead + self.version) * self.batch_size, ahead * self.batch_size + self.consumed]
        if self.num_steps is not None:
            limits.append(self.num_steps * self.batch_size)
        return min(limits)

    def continue_at(self, version: int) -> None:
        """Goes on in a run that has consumed a batch for each version before this one."""
        self.version = version
        self.accepted, self.held, self.consumed = version * self.batch_size, 0, version * self.batch_size

    def drop_stale(self, count: int) -> None:
        """Replaces accepted prompts that turned out too old."""
        self.accepted -= count
        self.stale += count

    def is_too_old(self, version: int) -> bool:
        """Whether a sample whose oldest token is of `version` may no longer be consumed."""
        return version + self.max_head_offpolicyness < self.version


def choose_batch(
    ready: Sequence[int],
    running: Sequence[int],
    version: int,
    max_head_offpolicyness: int,
    batch_size: int,
) -> list[int] | None:
    """Which finished prompts to train on at `version`.

    Args:
        ready: version of the oldest token of each finished prompt; none too old.
        running: version at which each running prompt started.

    Returns:
        Indices into `ready`, oldest first; None when the trainer must wait for more to finish.
    """
    oldest_first = sorted(range(len(ready)), key=ready.__getitem__)
    chosen, left = oldest_first[:batch_size], oldest_first[batch_size:]
    if len(chosen) < batch_size:
        return None
    still_useful = [started for started in running if started + max_head_offpolicyness >= version]
    behind = sorted([ready[i] for i in left] + still_useful)
    # The batches to come take them in this order: the one at place p is consumed p // batch_size versions after the next.
    in_time = all(
        started + max_head_offpolicyness >= version + 1 + place // batch_size
        for place, started in enumerate(behind)
    )
    return chosen if in_time or not still_useful else None
