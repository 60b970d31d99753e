"""Tolerance for prompts that the trainer cannot use: how many are replaced before an error.

A failed prompt is logged and replaced `max_failures` times per batch, then the workflow's exception
is raised. Rejected prompts, and ones that are too stale, are replaced until there are too many in a
row.
"""

import logging
from collections.abc import Sequence

from areal_core.rollout.errors import NothingAccepted, RolloutStuck
from areal_core.rollout.group import Group
from areal_core.rollout.staleness import StalenessControl

logger = logging.getLogger(__name__)
MAX_BATCHES, MIN_PROMPTS = 4, 32  # in a row: four batches, at least 32 prompts


class Tolerance:
    """The counts of unusable prompts since the last batch."""

    def __init__(self, max_failures: int, control: StalenessControl) -> None:
        self.max_failures = max_failures
        self.control = control
        self._failures = self._stale = 0
        self._rejections = 0  # in a row, across batches

    def batch_taken(self) -> None:
        """Reset the counts that are per batch."""
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
