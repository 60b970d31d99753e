"""What the servers do while ranks wait for rollouts: a slow engine or a long prompt.

An engine that is slow is busy with all its requests after the others have finished theirs. A long
prompt leaves one engine busy with one request, the others of the same engine having finished.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Literal

from hangdoctor.model import Confidence
from hangdoctor.slow.engines import Engine
from hangdoctor.slow.sample import Observation

STANDS_OUT = 0.5
"""Difference of the busy shares of two servers."""
LEAST_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Blame:
    """The server that ranks wait for, or a long prompt. `engine` is empty where it changes."""

    label: Literal["slow_engine", "long_prompt"]
    confidence: Confidence
    engine: str
    sentence: str
    evidence: tuple[str, ...]


def blame_server(seen: Observation, late: set[int]) -> Blame | None:
    """Return the server that holds the ranks, or a long prompt; None where nothing stands out.

    Args:
        seen: all rounds.
        late: indices of the tracks of ranks that are late, empty where all wait or it changes.
    """
    tail = tail_rounds(seen, late)
    engines = [engine for engine in seen.engines if engine.loads]
    if len(tail) < LEAST_ROUNDS or not any(busy_share(engine, tail) for engine in engines):
        return None
    busy = {engine.name: busy_share(engine, tail) for engine in engines}
    ordered = sorted(engines, key=lambda engine: -busy[engine.name])
    facts = tuple(
        f"{engine.name}: busy in {100 * busy[engine.name]:.0f} % of the moments in which ranks wait for "
        f"rollouts, with {requests_in(engine, tail):g} of up to {peak_requests(engine)} requests"
        for engine in ordered
    )
    first = ordered[0]
    is_alone = len(ordered) > 1 and busy[first.name] - busy[ordered[1].name] >= STANDS_OUT
    if not is_alone and len(ordered) > 1:
        return long_prompts_in_turn(ordered, tail, facts)
    if requests_in(first, tail) <= 1 < peak_requests(first):
        sentence = (
            f"One long prompt on {first.name} holds the job, not the engine: its other requests are done."
        )
        return Blame("long_prompt", "medium", first.name, sentence, facts)
    if not is_alone:
        return None
    certain = peak_requests(first) > 1
    sentence = f"{first.name.capitalize()} is slow" + (
        "." if certain else ", or its only request is long: one request at a time does not separate the two."
    )
    return Blame("slow_engine", "high" if certain else "low", first.name, sentence, facts)


def tail_rounds(seen: Observation, late: set[int]) -> list[int]:
    """Return the rounds in which ranks wait for rollouts: late ones if known, and all others of
    them wait in collectives, if enough rounds are like that.
    """
    waiting, alone = [], []
    for index, row in enumerate(zip(*(track.activities for track in seen.tracks), strict=True)):
        requesting = {i for i, a in enumerate(row) if a is not None and a.phase == "rollout"}
        if not requesting or (late and not requesting & late):
            continue
        waiting.append(index)
        if sum(a is not None and a.waits for a in row) * 2 >= len(row):
            alone.append(index)
    return alone if len(alone) >= LEAST_ROUNDS else waiting


def busy_share(engine: Engine, rounds: Sequence[int]) -> float:
    loads = [engine.loads[index] for index in rounds if index in engine.loads]
    return mean(load.busy for load in loads) if loads else 0.0


def requests_in(engine: Engine, rounds: Sequence[int]) -> float:
    loads = [engine.loads[index] for index in rounds if index in engine.loads]
    return median([load.num_requests or 1 for load in loads if load.busy] or [0])


def peak_requests(engine: Engine) -> int:
    seen = max((load.num_requests or int(load.busy) for load in engine.loads.values()), default=0)
    return max(seen, len(engine.clients))


def long_prompts_in_turn(
    engines: Sequence[Engine], tail: Sequence[int], facts: tuple[str, ...]
) -> Blame | None:
    """Return the verdict where one request after the other is the last on changing servers."""
    total = [
        sum(e.loads[i].num_requests or int(e.loads[i].busy) for e in engines if i in e.loads) for i in tail
    ]
    peak = max(
        sum(e.loads[i].num_requests or int(e.loads[i].busy) for e in engines if i in e.loads)
        for i in range(max(max(e.loads) for e in engines if e.loads) + 1)
    )
    if peak < 2 or median(total) > 1:
        return None
    sentence = f"A long prompt at a time holds the job: the last of up to {peak} requests runs alone."
    return Blame("long_prompt", "medium", "", sentence, facts)
