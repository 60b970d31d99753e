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

`Tolerance` counts the prompts that the trainer cannot use. A failed one is logged and replaced
`max_failures` times per batch, then the workflow's exception is raised. Rejected prompts, and ones
that are too stale, are replaced until there are too many in a row.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from areal_core.rollout.episodes import Group
from areal_core.rollout.errors import NothingAccepted, RolloutStuck

MAX_BATCHES, MIN_PROMPTS = 4, 32  # in a row: four batches, at least 32 prompts
logger = logging.getLogger(__name__)


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
        self.version = version
        self.accepted, self.held, self.consumed = version * self.batch_size, 0, version * self.batch_size

    def drop_stale(self, count: int) -> None:
        self.accepted -= count
        self.stale += count

    def is_stale(self, version: int) -> bool:
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


class Tolerance:
    """The counts of unusable prompts since the last batch."""

    def __init__(self, max_failures: int, control: StalenessControl) -> None:
        self.max_failures = max_failures
        self.control = control
        self._failures = self._stale = 0
        self._rejections = 0  # in a row, across batches

    def batch_taken(self) -> None:
        self._failures = self._stale = 0

    def judged(self, accepted: bool) -> None:
        """Count a prompt that was accepted or rejected."""
        self._rejections = 0 if accepted else self._rejections + 1

    def failed(self, group: Group, error: Exception) -> bool:
        """Return whether this failure exceeds the limit; otherwise log it."""
        self._failures += 1
        if self._failures > self.max_failures:
            return True
        logger.warning(
            "prompt %d failed (%d of at most %d per batch): %s: %s",
            *(group.prompt_id, self._failures, self.max_failures, type(error).__name__, error),
        )
        return False

    def count_stale(self, stale: Sequence[Group]) -> None:
        """Log dropped stale prompts. Raises RolloutStuck if there are too many in a row."""
        self._stale += len(stale)
        facts = (
            f"their oldest tokens are of version {stale[0].version}, the trainer is at {self.control.version} and "
            f"max_head_offpolicyness is {self.control.max_head_offpolicyness}"
        )
        if self._stale >= self._too_many():
            raise RolloutStuck(
                f"{self._stale} prompts in a row were too stale: {facts}; did the engine get the new weights?"
            )
        logger.warning("%d prompts (the first is %d) were dropped: %s", len(stale), stale[0].prompt_id, facts)

    def refuse_hopeless_filter(self) -> None:
        """Raise NothingAccepted if too many prompts in a row were rejected."""
        if self._rejections >= self._too_many():
            raise NothingAccepted(
                f"{self._rejections} prompts in a row were rejected at version {self.control.version}: let the workflow or "
                f"should_accept_fn accept more, or look at the rewards of these prompts"
            )

    def _too_many(self) -> int:
        return max(MIN_PROMPTS, MAX_BATCHES * self.control.batch_size)
