"""Reports on waits that take long: what is awaited, and what it waits for."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from areal_core.rollout.episodes import EpisodeEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """The durations after which a wait is reported.

    An episode without a request to the engine is in a reward, a tool or an agent's code. A reward
    process is killed after 15 s (`RewardPool`), so more than 20 s are unusual. A completion may
    take minutes.
    """

    check_every_s: float = 1.0
    paused_s: float = 5.0
    own_code_s: float = 20.0
    generation_s: float = 60.0


class Watch:
    """One wait for `wanted`, which starts now."""

    def __init__(self, patience: Patience, wanted: str) -> None:
        self.wanted = wanted
        self._patience = patience
        self._start = time.monotonic()
        self._next_s: dict[str, float] = {}

    def paused(self, what: str) -> None:
        """Report that `what` is paused, if it has been for long."""
        waited_s = time.monotonic() - self._start
        if self._is_due(what, waited_s, self._patience.paused_s):
            self._report(f"{what} has been paused for all of {waited_s:.0f} s; call its resume()")

    def report_slow(self, episodes: Sequence[EpisodeEngine]) -> None:
        """Report the running episodes without progress for the longest time."""
        now = time.monotonic()
        running = [episode for episode in episodes if not episode.is_finished]
        oldest_first = sorted(running, key=lambda episode: episode.since)
        own_code = [episode for episode in oldest_first if episode.num_generating == 0]
        generating = [episode for episode in oldest_first if episode.num_generating > 0]
        if own_code and self._is_due("own code", now - own_code[0].since, self._patience.own_code_s):
            self._report(
                f"{len(own_code)} episodes are in a reward, a tool or the workflow's own code, {episode_name(own_code[0])} "
                f"for {now - own_code[0].since:.0f} s: is a call in it stuck?"
            )
        if generating and self._is_due("engine", now - generating[0].since, self._patience.generation_s):
            self._report(
                f"{len(generating)} episodes wait for the engine, {episode_name(generating[0])} for "
                f"{now - generating[0].since:.0f} s: are the completions long, or are the servers paused?"
            )

    def _is_due(self, what: str, waited_s: float, after_s: float) -> bool:
        if waited_s < self._next_s.setdefault(what, after_s):
            return False
        self._next_s[what] = 2 * waited_s
        return True

    def _report(self, text: str) -> None:
        logger.warning("waiting for %s: %s", self.wanted, text)


def episode_name(episode: EpisodeEngine) -> str:
    return f"prompt {episode.prompt_id}, sample {episode.sample_id}"
