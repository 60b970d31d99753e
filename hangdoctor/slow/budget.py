"""The time budget of each rank, and who was late: pure functions of what the rounds saw.

A round is *held* when at least half of the ranks wait and some do not: those are late in it. All
numbers are shares of the rounds, so 1.0 is the complete time.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from hangdoctor.slow.phases import PHASE_NAMES, WAITING, Activity
from hangdoctor.slow.sample import Track

HELD = 0.5


@dataclass(frozen=True, slots=True)
class Budget:
    """The time of one rank.

    `shares` maps each phase to its share of the samples, `places` to the call that was seen most
    often in it. `late` is the share of the held rounds in which this rank did not wait, `gil` that
    of its samples in which another thread held the GIL, at `gil_place`; `busy` maps each phase to
    the share of its samples in which the main thread was running or runnable.
    """

    rank: int
    pid: int
    num_samples: int
    shares: dict[str, float]
    places: dict[str, str]
    busy: dict[str, float]
    late: float
    gil: float
    gil_place: str
    cpu_wait: float

    @property
    def waiting(self) -> float:
        """The share of the time in which it waited for other ranks."""
        return sum(self.shares.get(phase, 0.0) for phase in WAITING)


@dataclass(frozen=True, slots=True)
class Round:
    """One held round: the index of the round, and the phase of each late rank."""

    index: int
    late: dict[int, Activity]


def held_rounds(tracks: Sequence[Track]) -> list[Round]:
    """Return the rounds in which at least half of the ranks that were read wait for the others."""
    found = []
    for index, activities in enumerate(zip(*(track.activities for track in tracks), strict=True)):
        seen = {i: activity for i, activity in enumerate(activities) if activity is not None}
        late = {i: activity for i, activity in seen.items() if not activity.waits}
        if late and len(seen) - len(late) >= HELD * len(seen):
            found.append(Round(index, late))
    return found


def budgets(tracks: Sequence[Track]) -> list[Budget]:
    held = held_rounds(tracks)
    return [budget_of(i, track, held) for i, track in enumerate(tracks) if any(track.activities)]


def budget_of(index: int, track: Track, held: Sequence[Round]) -> Budget:
    seen = [activity for activity in track.activities if activity is not None]
    by_phase = {phase: [a for a in seen if a.phase == phase] for phase in PHASE_NAMES}
    by_phase = {phase: found for phase, found in by_phase.items() if found}
    held_by = Counter(a.gil_held_at for a in seen if a.gil_held_at)
    return Budget(
        rank=track.rank if track.rank is not None else index,
        pid=track.pid,
        num_samples=len(seen),
        shares={phase: len(found) / len(seen) for phase, found in by_phase.items()},
        places={p: Counter(a.place for a in found).most_common(1)[0][0] for p, found in by_phase.items()},
        busy={p: sum(a.busy for a in found) / len(found) for p, found in by_phase.items()},
        late=sum(index in one.late for one in held) / len(held) if held else 0.0,
        gil=sum(bool(a.gil_held_at) for a in seen) / len(seen),
        gil_place=held_by.most_common(1)[0][0] if held_by else "",
        cpu_wait=track.cpu_wait,
    )


def typical(ranks: Sequence[Budget], phase: str) -> float:
    return median(budget.shares.get(phase, 0.0) for budget in ranks) if ranks else 0.0


def upper_quartile(values: Sequence[float]) -> float:
    """Return the value that a quarter of the values reach: the wait of the ranks that are not late,
    also where several are.
    """
    return sorted(values)[math.ceil(3 * (len(values) - 1) / 4)]
