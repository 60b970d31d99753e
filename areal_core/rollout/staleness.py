"""Staleness control: how many prompts may be in flight, and which ones form the next batch.

Arithmetic only, no threads. A prompt that starts at version `s` may be consumed at version
`s + max_head_offpolicyness` at the latest. Two rules guarantee that without discarding samples:

* **Start**: until version `v` at most `(max_head_offpolicyness + v + 1) * batch_size` prompts are
  accepted or running in total, and at most `(max_head_offpolicyness + 1) * batch_size` of them are
  not yet consumed (which is equivalent, unless a version moved without a batch). So all prompts in
  flight fit into the batches within the limit.
* **Consume**: the oldest finished prompts, unless the remaining ones would then no longer fit into
  the batches within their limit: then the trainer waits for one of those. (Consuming any finished
  prompt would let the staleness of a long episode grow without bound.)
"""

from collections.abc import Sequence
from dataclasses import dataclass


def per_rank(total: int, num_ranks: int) -> int:
    """Return a rank's share of a limit; at least 1, since with 0 no prompt could start."""
    return max(1, total // num_ranks)


@dataclass
class StalenessControl:
    """The counts of one data-parallel rank. The unit is the prompt with all its samples.

    Args:
        batch_size: prompts that the trainer consumes from this rank per version.
        max_concurrent: maximum number of running prompts.
        max_head_offpolicyness: maximum staleness, in versions between the trainer and a sample's
            oldest token.
        num_steps: version at which training ends; prompts that no step would consume are not
            started. None: unknown.
    """

    batch_size: int
    max_concurrent: int
    max_head_offpolicyness: int = 0
    num_steps: int | None = None
    version: int = 0
    accepted: int = 0  # since the run started, including consumed ones, excluding stale ones
    held: int = 0  # rejected, but counted in a batch, which is then smaller
    consumed: int = 0
    running: int = 0
    rejected: int = 0
    failed: int = 0
    stale: int = 0  # finished, but too stale: only if versions move without a batch

    def capacity(self) -> int:
        """Return how many prompts may start now; negative if too many are in flight."""
        free = self.max_concurrent - self.running
        return min(free, self.staleness_limit() - (self.accepted + self.held + self.running))

    def staleness_limit(self) -> int:
        """Return the maximum number of accepted, held and running prompts at this version."""
        ahead = self.max_head_offpolicyness + 1
        limits = [(ahead + self.version) * self.batch_size, ahead * self.batch_size + self.consumed]
        if self.num_steps is not None:
            limits.append(self.num_steps * self.batch_size)
        return min(limits)

    def continue_at(self, version: int) -> None:
        """Continue a run that has consumed a batch for each version before this one."""
        self.version = version
        self.accepted, self.held, self.consumed = version * self.batch_size, 0, version * self.batch_size

    def drop_stale(self, count: int) -> None:
        """Count accepted prompts as stale, so that others replace them."""
        self.accepted -= count
        self.stale += count

    def is_stale(self, version: int) -> bool:
        """Return whether a sample with an oldest token of `version` is too stale to be consumed."""
        return version + self.max_head_offpolicyness < self.version


def choose_batch(
    ready: Sequence[int],
    running: Sequence[int],
    version: int,
    max_head_offpolicyness: int,
    batch_size: int,
) -> list[int] | None:
    """Choose the finished prompts to train on at `version`.

    Args:
        ready: version of the oldest token of each finished prompt; none too stale.
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
    # Later batches consume them in this order: the one at place p is consumed p // batch_size
    # versions after the next.
    in_time = all(
        started + max_head_offpolicyness >= version + 1 + place // batch_size
        for place, started in enumerate(behind)
    )
    return chosen if in_time or not still_useful else None
