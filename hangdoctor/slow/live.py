"""Sample a running job and return who is slow; native stacks only where the collector may run."""

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

from hangdoctor.collect import pyspy
from hangdoctor.collect.discover import Search, find_job
from hangdoctor.collect.process import descendants, process_table
from hangdoctor.errors import HangInputError, UnreadableDump
from hangdoctor.frames import main_thread
from hangdoctor.parse.stacks_json import parse_stacks_json
from hangdoctor.slow.blame import Budget, SlowVerdict, judge
from hangdoctor.slow.phases import MAY_COLLECT, WAITING, place_of
from hangdoctor.slow.sample import PARALLEL, SECONDS, TIMEOUT_S, collects_garbage, observe

LOOKS, LOOK_FOR_S = 8, 4.0
LOOK_EVERY_S = 0.17
WORKER_LOOKS, MAX_WORKERS = 4, 8
LEAST_BUSY = 0.5
LEAST_SHARE = 0.1


def who_is_slow(search: Search, seconds: float = SECONDS) -> SlowVerdict:
    """Sample the job that `search` finds on this host, and return who is slow.

    Raises:
        HangInputError: no py-spy, no rank, or more than one job (subclasses in `errors`).
    """
    seen = observe(search, seconds)
    verdict = judge(seen, {})
    if suspects := collector_suspects(verdict):
        verdict = judge(seen, garbage_shares(suspects))
    return with_loader_workers(verdict) if verdict.cause == "input" and verdict.culprit_ranks else verdict


def with_loader_workers(verdict: SlowVerdict) -> SlowVerdict:
    """Return a verdict with the call that the processes below the slow rank are in: its loader's
    workers, where it has any.
    """
    pid = next(budget.pid for budget in verdict.ranks if budget.rank == verdict.culprit_ranks[0])
    tool, places = pyspy.find_pyspy(), Counter[str]()
    for _ in range(WORKER_LOOKS):
        for child in descendants([pid], process_table())[:MAX_WORKERS]:
            done = pyspy.dump_once(tool, child, TIMEOUT_S)
            with suppress(UnreadableDump):
                main = main_thread(parse_stacks_json(done.output)[1]) if done.status == "dumped" else None
                places[place_of(main.frames) if main else ""] += 1
        time.sleep(LOOK_EVERY_S)
    del places[""], places[verdict.place]  # a fork that waits for work shows the call that forked it
    if not places:
        return verdict
    place = places.most_common(1)[0][0]
    return replace(verdict, evidence=(f"its loader's worker is at {place}", *verdict.evidence))


def sentence_about(search: Search, seconds: float) -> str | None:
    """Return one sentence on who is slow, None where nothing is or the ranks cannot be compared."""
    try:
        job = find_job(search, process_table())
        if sum(target.role == "trainer" for target in job.targets) < 2:
            return None
        verdict = who_is_slow(search, seconds)
    except HangInputError:
        return None
    return None if verdict.label in ("no_rank_is_slow", "inconclusive") else verdict.summary


def collector_suspects(verdict: SlowVerdict) -> list[Budget]:
    """Return the ranks in which garbage collection, which Python stacks do not show, could be the
    cause: those accused of a phase that uses the CPU, or all where ranks wait and none is accused.
    """
    if verdict.label == "slow_rank":
        accused = [budget for budget in verdict.ranks if budget.rank in verdict.culprit_ranks][:1]
        return [budget for budget in accused if may_collect(budget)]
    waits = sum(budget.waiting for budget in verdict.ranks) / max(len(verdict.ranks), 1)
    if verdict.label in ("late_in_turn", "no_rank_is_slow") and waits >= LEAST_SHARE * 2:
        return [budget for budget in verdict.ranks if may_collect(budget)]
    return []


def may_collect(budget: Budget) -> bool:
    return any(
        budget.shares.get(phase, 0.0) >= LEAST_SHARE and budget.busy[phase] >= LEAST_BUSY
        for phase in MAY_COLLECT
        if phase in budget.busy and phase not in WAITING
    )


def garbage_shares(suspects: Sequence[Budget]) -> dict[int, float]:
    look = partial(collects_garbage, tool=pyspy.find_pyspy())
    counts, looks, started = [0] * len(suspects), 0, time.monotonic()
    with ThreadPoolExecutor(PARALLEL) as pool:
        while looks < LOOKS and time.monotonic() - started < LOOK_FOR_S:
            found = pool.map(look, [budget.pid for budget in suspects])
            counts = [count + hit for count, hit in zip(counts, found, strict=True)]
            looks += 1
            time.sleep(LOOK_EVERY_S)
    return {budget.rank: count / looks for budget, count in zip(suspects, counts, strict=True)}
