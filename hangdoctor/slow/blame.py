"""Who is slow, and why: one verdict of the time budgets of all ranks.

A rank that is late never waits: where the others wait for a share of their time and one does not,
it is that one, and the phase that takes it longer than the others is the cause. Where all wait
equally and the late rank changes, one phase may still be what makes each late: ranks are late in
turn. Where neither holds, no rank is slow. A difference counts from LEAST_EXCESS of the time, and
where chance would not make it in SURE_SIGMA standard deviations.

A round is *held* when at least half of the ranks wait and some do not: those are late in it. All
numbers are shares of the rounds, so 1.0 is the complete time.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median
from typing import Literal

from hangdoctor.graph import rank_ranges
from hangdoctor.model import Confidence, NextStep
from hangdoctor.slow.phases import CAUSES, OTHER, PHASE_NAMES, STARTUP, WAITING, Activity
from hangdoctor.slow.sample import Observation, Track
from hangdoctor.slow.servers import Blame, blame_server

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


SlowLabel = Literal[
    "slow_rank", "late_in_turn", "slow_engine", "long_prompt", "no_rank_is_slow", "inconclusive"
]
LEAST_EXCESS = 0.12
SURE_SIGMA = 3.0
LEAST_ROUNDS = 8
LEAST_LATE = 0.5
LEAST_LOST = 0.15
"""Above LEAST_EXCESS: the time of a healthy step varies, and the last of the ranks decides."""
LEAST_HELD = 0.2
LEAST_LIFT = 0.15
"""By how much the phase must be more of what makes ranks late than of what they do."""
HALF_A_ROUND = 0.5
"""Standard deviation of the length of a phase that is counted in rounds."""
MAIN_SHARE = 0.5
LEAST_STARTUP = 0.3
COMPUTE = ("forward", "backward")
ORDINARY = (*COMPUTE, OTHER, "optimizer")
"""Phases in which every rank of a healthy job is late now and then."""
USUAL_STEP = ("py-spy record --nonblocking --pid PID --duration 30", "profiles what this rank does meanwhile")


@dataclass(frozen=True, slots=True)
class SlowVerdict:
    """The answer. `as_json` returns exactly the object that `--json` prints.

    `cause` is a key of CAUSES or empty, `place` the call that it was seen in; shares are of
    the time.
    """

    label: SlowLabel
    confidence: Confidence
    cause: str
    culprit_ranks: tuple[int, ...]
    culprit_engine: str
    summary: str
    place: str = ""
    evidence: tuple[str, ...] = ()
    next_steps: tuple[NextStep, ...] = ()
    ranks: tuple[Budget, ...] = ()
    num_rounds: int = 0
    seconds: float = 0.0

    def as_json(self) -> dict[str, object]:
        """Return a dict of plain lists, strings and numbers, ready for `json.dumps`."""
        return asdict(self)


def judge(seen: Observation, garbage: Mapping[int, float]) -> SlowVerdict:
    """Return who is slow.

    Args:
        seen: all rounds.
        garbage: rank to the share of its native stacks that show the garbage collector, for ranks
            whose stacks were read that way.
    """
    ranks = budgets(seen.tracks)
    answer = (
        too_little(seen, ranks)
        or stands_still(seen)
        or slow_ranks(seen, ranks, garbage)
        or still_starting(ranks)
        or late_in_turn(seen, ranks, garbage)
        or busy_server(seen, ranks)
        or no_rank_is_slow(seen, ranks)
    )
    return replace(answer, ranks=tuple(ranks), num_rounds=seen.num_rounds, seconds=seen.seconds)


def too_little(seen: Observation, ranks: Sequence[Budget]) -> SlowVerdict | None:
    unread = [track for track in seen.tracks if sum(a is not None for a in track.activities) < 3]
    if unread:
        names = ", ".join(track.name for track in unread[:8])
        return inconclusive(f"{names} cannot be read, so the ranks cannot be compared: {unread[0].problem}")
    if seen.num_rounds < LEAST_ROUNDS:
        return inconclusive(
            f"Only {seen.num_rounds} rounds of stacks were read in {seen.seconds:.0f} s: this machine is busy. Give "
            "more time with --seconds."
        )
    if len(ranks) < 2:
        time = ", ".join(largest(ranks))
        where = f"; {len(seen.elsewhere)} ranks are on other hosts" if seen.elsewhere else ""
        return inconclusive(f"There is one rank here to look at{where}: its time goes to {time}.")
    return None


def stands_still(seen: Observation) -> SlowVerdict | None:
    """Return the verdict for a job in which no rank has run or moved in the second half of the
    rounds: it hangs, or waits for something outside.
    """
    last = [track.activities[seen.num_rounds // 2 :] for track in seen.tracks]
    places = [{(a.phase, a.place) for a in activities if a is not None} for activities in last]
    ran = any(a is not None and a.busy and not a.waits for activities in last for a in activities)
    waits = any(a is not None and a.waits for activities in last for a in activities)
    if seen.elsewhere or ran or not waits or any(len(found) != 1 for found in places):
        return None
    pid = seen.tracks[0].pid
    return inconclusive(
        f"No rank has moved for {seen.seconds / 2:.0f} s: the job is not slow, it hangs or waits for something outside. "
        f"Why: areal-debug hang --pid {pid}"
    )


def inconclusive(summary: str) -> SlowVerdict:
    return SlowVerdict("inconclusive", "low", "", (), "", summary)


def slow_ranks(
    seen: Observation, ranks: Sequence[Budget], garbage: Mapping[int, float]
) -> SlowVerdict | None:
    """Return the verdict for ranks that do not wait while the others do, or None."""
    late = late_ranks(ranks)
    if not late:
        return None
    peers = [budget for budget in ranks if budget not in late]
    worst = min(late, key=lambda budget: budget.waiting)
    excess = upper_quartile([budget.waiting for budget in ranks]) - worst.waiting
    cause, place, share = cause_of(worst, peers, excess, garbage)
    numbers = tuple(budget.rank for budget in late)
    usual = typical(peers, cause) if cause in PHASE_NAMES else None
    who = f"Rank {numbers[0]} is" if len(late) == 1 else f"Ranks {rank_ranges(numbers)} are"
    compared = "" if usual is None else f" (the others: {percent(usual)})"
    waits = median(budget.waiting for budget in peers)
    summary = (
        f"{who} slow: {CAUSES[cause]['name']} takes {percent(share)} of the time{compared}"
        f"{f' at {place}' if place else ''}, and the others wait {percent(waits)} of theirs."
    )
    evidence = (
        f"rank {worst.rank} waits {percent(worst.waiting)} of the time, the other {len(peers)} ranks "
        f"{percent(min(b.waiting for b in peers))} to {percent(max(b.waiting for b in peers))}",
        f"in {percent(worst.late)} of the moments in which most ranks wait, rank {worst.rank} does not",
    )
    sure: Confidence = "high" if excess >= 2 * LEAST_EXCESS and worst.late >= 0.7 else "medium"
    answer = SlowVerdict(
        "slow_rank", sure, cause, numbers, "", summary, place, evidence, settling(cause, worst.pid)
    )
    if cause == "rollout":
        mine = {i for i, track in enumerate(seen.tracks) if track.rank in numbers}
        return with_server(answer, blame_server(seen, mine))
    return answer


def late_ranks(ranks: Sequence[Budget]) -> list[Budget]:
    """Return the ranks that wait less than the upper quartile does: the one that waits least, if
    that is significant, and those within a third of the difference from it.
    """
    usual = upper_quartile([budget.waiting for budget in ranks])
    worst = min(ranks, key=lambda budget: budget.waiting)
    variance = usual * (1 - usual) + worst.waiting * (1 - worst.waiting)
    sigma = math.sqrt(variance / worst.num_samples)
    if usual - worst.waiting < max(LEAST_EXCESS, SURE_SIGMA * sigma):
        return []
    near = worst.waiting + (usual - worst.waiting) / 3
    return [budget for budget in ranks if budget.waiting <= near and budget.late >= LEAST_LATE]


def cause_of(
    worst: Budget, peers: Sequence[Budget], excess: float, garbage: Mapping[int, float]
) -> tuple[str, str, float]:
    more = {
        phase: share - typical(peers, phase)
        for phase, share in worst.shares.items()
        if phase not in WAITING and share > typical(peers, phase)
    }
    if not more:
        return OTHER, "", 0.0
    main = max(more, key=lambda phase: more[phase])
    if garbage.get(worst.rank, 0.0) >= MAIN_SHARE * worst.shares[main]:
        return "gc", worst.places[main], worst.shares[main]
    if worst.gil - median(b.gil for b in peers) >= MAIN_SHARE * excess:
        return "gil", worst.gil_place, worst.gil
    if main in ORDINARY and worst.cpu_wait - median(b.cpu_wait for b in peers) >= MAIN_SHARE * excess:
        return "cpu", worst.places[main], worst.cpu_wait
    if main in COMPUTE and min(more.get(phase, 0.0) for phase in COMPUTE) >= more[main] / 4:
        return "compute", "", sum(worst.shares[phase] for phase in COMPUTE)
    return main, worst.places[main], worst.shares[main]


def still_starting(ranks: Sequence[Budget]) -> SlowVerdict | None:
    share = mean(budget.shares.get(STARTUP, 0.0) for budget in ranks)
    if share < LEAST_STARTUP:
        return None
    return inconclusive(
        f"The ranks are starting: imports, process groups and models take {percent(share)} of the time. "
        "Look again once the job trains."
    )


def late_in_turn(
    seen: Observation, ranks: Sequence[Budget], garbage: Mapping[int, float]
) -> SlowVerdict | None:
    last = last_rounds(held_rounds(seen.tracks))
    times = Counter(i for one in last for i in one.late).most_common(2)
    few = len(times) < 2 or times[1][1] * 2 <= times[0][1]
    if not last or (times[0][1] >= MAIN_SHARE * len(last) and few):
        return None  # none, or of one rank
    lost = lost_shares(seen, last)
    phase = max(lost, key=lambda phase: lost[phase])
    collected = mean(garbage.values()) if garbage else 0.0
    is_garbage = collected >= 0.3 * mean(budget.shares.get(phase, 0.0) for budget in ranks)
    chance = SURE_SIGMA * HALF_A_ROUND * math.sqrt(len(last)) / seen.num_rounds
    if lost[phase] < max(LEAST_LOST, chance) or (phase in ORDINARY and not is_garbage):
        return None
    working = [a.phase for track in seen.tracks for a in track.activities if a is not None and not a.waits]
    if (
        lost[phase] / sum(max(share, 0.0) for share in lost.values())
        < mean(p == phase for p in working) + LEAST_LIFT
    ):
        return None
    cause = "gc" if is_garbage else phase
    place = Counter(b.places[phase] for b in ranks if phase in b.places).most_common(1)[0][0]
    waits = mean(budget.waiting for budget in ranks)
    summary = (
        f"No single rank is slow: ranks are late in turn, by {CAUSES[cause]['name']} at {place}; all wait, "
        f"{percent(waits)} of the time, {percent(lost[phase])} for this."
    )
    evidence = (
        f"before most ranks wait, the last one was in {PHASE_NAMES[phase]} for {percent(lost[phase])} of the "
        "time longer than they were",
    )
    answer = SlowVerdict(
        "late_in_turn", "medium", cause, (), "", summary, place, evidence, settling(cause, ranks[0].pid)
    )
    return with_server(answer, blame_server(seen, set())) if cause == "rollout" else answer


def lost_shares(seen: Observation, last_ones: Sequence[Round]) -> dict[str, float]:
    """Return the share of the time that the last ranks spend in each phase longer than the others.

    Counted in the rounds from one moment in which most ranks wait for a rank to the next: what has
    delayed it may be over by the time that the others wait.
    """
    lost: Counter[str] = Counter()
    start = 0
    for last in last_ones:
        late = [track for i, track in enumerate(seen.tracks) if i in last.late]
        others = [track for i, track in enumerate(seen.tracks) if i not in last.late]
        for tracks, sign in ((late, 1), (others, -1)):
            for track in tracks:
                for activity in track.activities[start : last.index + 1]:
                    if activity is not None and not activity.waits:
                        lost[activity.phase] += sign / len(tracks)  # type: ignore[assignment]
        start = last.index + 1
    return {phase: rounds / seen.num_rounds for phase, rounds in lost.items()}


def last_rounds(held: Sequence[Round]) -> list[Round]:
    ended = [
        one
        for one, after in itertools.pairwise(held)
        if after.index > one.index + 1 or not one.late.keys() & after.late.keys()
    ]
    return [*ended, *held[-1:]]


def busy_server(seen: Observation, ranks: Sequence[Budget]) -> SlowVerdict | None:
    if mean(budget.shares.get("rollout", 0.0) for budget in ranks) < LEAST_HELD:
        return None
    blame = blame_server(seen, set())
    if blame is None or not blame.engine:  # prompts in turn make ranks late, which none is
        return None
    share = mean(budget.shares.get("rollout", 0.0) for budget in ranks)
    summary = f"No rank is slow: all wait for rollouts, {percent(share)} of the time."
    empty = SlowVerdict(
        "no_rank_is_slow", "medium", "rollout", (), "", summary, "", (), settling("rollout", 0)
    )
    return with_server(empty, blame)


def with_server(answer: SlowVerdict, blame: Blame | None) -> SlowVerdict:
    """Return a verdict about rollouts with the server that is behind it, where one is known."""
    if blame is None:
        return answer
    return replace(
        answer,
        label=blame.label,
        confidence=blame.confidence,
        culprit_engine=blame.engine,
        summary=f"{blame.sentence} {answer.summary}",
        evidence=(*blame.evidence, *answer.evidence),
    )


def no_rank_is_slow(seen: Observation, ranks: Sequence[Budget]) -> SlowVerdict:
    waits = [budget.waiting for budget in ranks]
    between = f"all {len(ranks)} wait {percent(min(waits))} to {percent(max(waits))} of their time"
    if seen.elsewhere and mean(waits) >= LEAST_HELD:
        return inconclusive(
            f"No rank on this host is slow: {between}, maybe for one of the {len(seen.elsewhere)} ranks on "
            "other hosts: run this there, too."
        )
    summary = f"No rank is slow: {between}; the time goes to {', '.join(largest(ranks))}."
    together = mean(
        all(a is not None and a.waits for a in row)
        for row in zip(*(t.activities for t in seen.tracks), strict=True)
    )
    evidence: tuple[str, ...] = ()
    if together >= MAIN_SHARE:
        evidence = (
            f"all ranks are in collectives at the same time for {percent(together)}: the network or the "
            "devices, not a rank",
        )
    return SlowVerdict("no_rank_is_slow", "medium", "", (), "", summary, "", evidence)


def largest(ranks: Sequence[Budget]) -> list[str]:
    """Return the three largest phases of the mean budget as texts."""
    means = {phase: mean(b.shares.get(phase, 0.0) for b in ranks) for phase in PHASE_NAMES} if ranks else {}
    top = sorted(means, key=lambda phase: -means[phase])[:3]
    return [f"{PHASE_NAMES[phase]} ({percent(means[phase])})" for phase in top if means[phase] >= 0.01]


def settling(cause: str, pid: int) -> tuple[NextStep, ...]:
    row = CAUSES[cause]
    do, why = (row["do"], row["why"]) if "do" in row else USUAL_STEP
    return (NextStep(do.replace("PID", str(pid)), why),)


def percent(share: float) -> str:
    """Return a share as a whole number of percent."""
    return f"{100 * share:.0f} %"
