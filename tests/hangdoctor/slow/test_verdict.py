"""Verdicts about rounds that are drawn: who is late, by what, and healthy jobs."""

import random
from bisect import bisect
from collections.abc import Callable

import pytest

from hangdoctor.slow.blame import judge
from hangdoctor.slow.engines import Engine, Load
from hangdoctor.slow.phases import Activity
from hangdoctor.slow.sample import Observation, Track

USUAL = {"input": 0.05, "forward": 0.15, "backward": 0.15, "optimizer": 0.05}
STEPS = 60
Extra = Callable[[int, int], tuple[str, float]]
"""Rank and step to a phase and the seconds that it takes longer."""


def job(extra: Extra, ranks: int = 8, seed: int = 0, gap_s: float = 0.31, **settings) -> Observation:
    """Return what rounds every `gap_s` see of a job whose steps end together, for 60 steps."""
    draw = random.Random(seed)
    lines: list[list[tuple[float, str]]] = [[] for _ in range(ranks)]
    clock = 0.0
    for step in range(STEPS):
        ends = []
        for rank, line in enumerate(lines):
            at = clock
            phase, longer = extra(rank, step)
            spent = {name: s * draw.uniform(0.8, 1.2) for name, s in USUAL.items()}
            spent[phase] = spent.get(phase, 0.0) + longer
            for name in ["input", *(n for n in spent if n not in USUAL), "forward", "backward", "optimizer"]:
                line.append((at, name))
                at += spent[name]
            line.append((at, "collective"))
            ends.append(at)
        clock = max(ends) + 0.1
    return sampled(lines, clock, gap_s, draw, **settings)


def sampled(lines, clock, gap_s, draw, engines=(), elsewhere=(), **fields) -> Observation:
    """Return the activities at each round; ranks are read up to 50 ms apart."""
    times = [draw.uniform(0.0, 0.05) + i * gap_s for i in range(50) if i * gap_s < clock]
    tracks = []
    for rank, line in enumerate(lines):
        starts = [start for start, _ in line]
        phases = [line[bisect(starts, t + draw.uniform(0.0, 0.05)) - 1][1] for t in times]
        activities = tuple(Activity(phase, f"{phase} (train.py:1)", True, **fields) for phase in phases)
        tracks.append(Track(f"rank_{rank}", rank, 100 + rank, activities))
    return Observation(tuple(tracks), tuple(engines), len(times), times[-1], elsewhere)


def nothing(rank, step):
    return "input", 0.0


def only(slow_rank, phase, seconds):
    return lambda rank, step: (phase, seconds if rank == slow_rank else 0.0)


@pytest.mark.parametrize("phase", ["input", "h2d", "forward", "backward", "optimizer", "checkpoint", "swap"])
@pytest.mark.parametrize("ranks", [2, 3, 8, 32])
def test_the_rank_that_never_waits_is_slow(phase, ranks):
    verdict = judge(job(only(1, phase, 0.5), ranks), {})
    assert (verdict.label, verdict.culprit_ranks, verdict.cause) == ("slow_rank", (1,), phase)
    assert verdict.place == f"{phase} (train.py:1)"
    assert verdict.summary.startswith("Rank 1 is slow: ")


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_healthy_job_is_not_accused(seed, ranks):
    verdict = judge(job(nothing, ranks, seed), {})
    assert verdict.label == "no_rank_is_slow"
    assert verdict.culprit_ranks == ()


def test_uneven_work_that_moves_from_rank_to_rank_accuses_none():
    draw = random.Random(3)
    verdict = judge(job(lambda rank, step: ("forward", draw.uniform(0, 0.4))), {})
    assert verdict.label == "no_rank_is_slow"


def test_garbage_that_only_native_stacks_show_is_the_cause():
    verdict = judge(job(only(2, "forward", 0.5)), {2: 0.6})
    assert (verdict.culprit_ranks, verdict.cause) == ((2,), "gc")
    assert judge(job(only(2, "forward", 0.5)), {2: 0.1}).cause == "forward"


def test_a_rank_that_starts_late_is_slow():
    starts = [2.0, 2.0, 9.0, 2.0]
    lines = [[(0.0, "startup"), (start, "collective")] for start in starts]
    verdict = judge(sampled(lines, 12.0, 0.31, random.Random(0)), {})
    assert (verdict.label, verdict.culprit_ranks, verdict.cause) == ("slow_rank", (2,), "startup")


def test_ranks_of_other_hosts_may_be_the_late_ones():
    lines = [[(0.0, "collective")] for _ in range(4)]
    seen = sampled(lines, 15.0, 0.31, random.Random(0), elsewhere=(4, 5, 6, 7))
    verdict = judge(seen, {})
    assert verdict.label == "inconclusive"
    assert "one of the 4 ranks on other hosts" in verdict.summary


def test_a_rank_that_cannot_be_read_is_named_with_the_reason():
    seen = job(nothing, 2)
    unread = Track("rank_2", 2, 9, (None,) * seen.num_rounds, problem="Permission Denied")
    verdict = judge(Observation((*seen.tracks, unread), (), seen.num_rounds, 15.0), {})
    assert verdict.label == "inconclusive"
    assert "rank_2 cannot be read" in verdict.summary
    assert "Permission Denied" in verdict.summary


def engine(name, requests):
    """A server with a number of requests in each round."""
    loads = {i: Load(n > 0, n, "decode (engine.py:1)") for i, n in enumerate(requests)}
    return Engine(name, (1,), frozenset(), loads)


def with_engines(seen, first, second):
    """The engines' numbers of requests where most ranks wait, and else 3 each."""
    held = [sum(t.activities[i].waits for t in seen.tracks) >= 4 for i in range(seen.num_rounds)]
    engines = [
        engine(n, [load if h else 3 for h in held]) for n, load in (("engine A", first), ("engine B", second))
    ]
    return Observation(seen.tracks, tuple(engines), seen.num_rounds, seen.seconds)


def test_an_engine_that_is_busy_with_all_its_requests_is_slow():
    seen = job(lambda rank, step: ("rollout", 0.8 if rank % 2 else 0.1))
    verdict = judge(with_engines(seen, 0, 3), {})
    assert (verdict.label, verdict.culprit_engine) == ("slow_engine", "engine B")
    assert verdict.culprit_ranks == (1, 3, 5, 7)


@pytest.mark.parametrize(("computes", "hangs"), [(False, True), (True, False)])
def test_a_job_that_hangs_is_not_called_slow(computes, hangs):
    waits = [Activity("collective", "barrier (t.py:7)", False)] * 20
    other = [Activity("other", "load (t.py:9)", computes)] * 20
    tracks = tuple(Track(f"rank_{r}", r, 50 + r, tuple(a)) for r, a in enumerate((waits, waits, other)))
    verdict = judge(Observation(tracks, (), 20, 10.0), {})
    assert ("areal-debug hang --pid 50" in verdict.summary) == hangs
