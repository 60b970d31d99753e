"""Trainer and engine wait for each other in a weight update of RL.

What it looks like: the trainer is in a broadcast (or a request, or `ray.get`) below a function such
as `update_weights`, and the engine is not on the other side of it: it is paused and waits for
requests that cannot end, it waits for a group that never forms, it generates for samples that the
trainer waits for first, or it has died. Or both are in the update, and the group has a member that
is neither.

Common causes: generation is paused while requests that the pause waits for are outstanding; the
world size of the update group (trainer ranks that send plus engine ranks) is wrong, or one server
of several was not asked to join; the engine raised in the middle of the update and only logged it;
the trainer sends another number of buckets or tensors than the engine expects; the
request to the engine is awaited before the trainer enters its own side of the collective.

What helps: send the request to the engine without waiting, enter the collective, then wait for the
reply; abort outstanding requests before a pause that waits for them; a time-out on both sides.
"""

from dataclasses import replace

from hangdoctor.case import Case
from hangdoctor.frames import location_of, show
from hangdoctor.graph import Graph, same_place
from hangdoctor.model import Confidence, Evidence
from hangdoctor.rules.verdict import (
    Verdict,
    confidence,
    name_ranks,
    ranks_of,
    step,
    stillness,
)
from hangdoctor.weight_sync import Side, sides_of

WAITS = (
    "collective", "p2p", "store", "http", "rpc", "future", "queue", "event", "lock", "socket", "sleep", "idle",
    "device", "blocked", "join",
)  # fmt: skip
STEPS = (
    step(
        "curl -m 5 http://SERVER/health", "is the engine alive, and does its log show an error of the update?"
    ),
    step(
        "print world_size and rank of the update group on every member",
        "one trainer rank that sends plus all engine ranks must be the world size on every side",
    ),
    step(
        "areal-debug hang collect --to FOLDER --pid TRAINER --pid ENGINE",
        "reads both sides at the same moment",
    ),
)
REFUTE = (
    "An engine whose stack changes while the trainer waits: then the update is slow.",
    "A trainer rank outside the update that the other trainer ranks wait for.",
)


def judge(case: Case, graph: Graph) -> Verdict | None:
    """Return the verdict if the pattern is present, else None."""
    sides = sides_of(case)
    inside = [s for s in sides if s.updates and s.thread_wait.kind in WAITS and not s.process.moved]
    if not inside or any(s.process.thread_wait.phases & {"error", "cleanup"} for s in sides):
        return None
    if any(s.updates and s not in inside for s in sides):
        return None  # it loads, converts or moves weights: the update makes progress
    roles = {s.is_engine for s in inside}
    opposite = [s for s in sides if s.is_engine not in roles and not s.updates] if len(roles) == 1 else []
    if any(s.process.works or s.process.moved for s in opposite):
        return None
    if len(roles) == 2:
        return both_inside(case, graph, inside)
    if opposite:
        return across(case, graph, inside, opposite)
    return one_side(case, graph, inside)


def both_inside(case: Case, graph: Graph, inside: list[Side]) -> Verdict:
    outside = [s for s in inside if s.thread_wait.kind not in ("collective", "p2p", "store", "device")]
    apart = {s.thread_wait.kind in ("collective", "p2p", "device") for s in inside} == {True, False}
    holders = outside if apart else []
    why = (
        "the two sides wait for different things"
        if len({s.thread_wait.operation for s in inside}) > 1
        else "both sides arrived, so the group has a member that is neither (a wrong world size), or the network fails"
    )
    return verdict(case, graph, inside, holders, why, "high" if holders else "medium")


def across(case: Case, graph: Graph, inside: list[Side], opposite: list[Side]) -> Verdict:
    """Return the verdict for one side that waits in the update while the other is not in it."""
    role = opposite[0].role
    paused = next((s.pauses for s in opposite if s.pauses), None)
    why = (
        f"the {role} is not in the update: it waits for a pause to begin or end in {show(paused)}"
        if paused
        else f"the {role} is not in the update"
    )
    return verdict(case, graph, [*inside, *opposite], opposite, why, "high" if paused else "medium")


def one_side(case: Case, graph: Graph, inside: list[Side]) -> Verdict | None:
    """Return the verdict where one side was read; None where its own ranks explain the wait."""
    waiting = [s.process for s in inside]
    if [s for s in graph.source_ranks if s not in waiting]:
        return None
    if absent := absent_engines(case):
        names = ", ".join(absent[:4])
        why = f"{names} {'is' if len(absent) == 1 else 'are'} on the other side and {case.snapshot.absent[absent[0]].replace('_', ' ')}"
        return replace(verdict(case, graph, inside, [], why, "high"), culprits=absent)
    if len(case.ranks) > 1 and len(waiting) == len(case.ranks) and same_place(graph.waiting):
        return None
    other = "engine" if not inside[0].is_engine else "trainer"
    meets = inside[0].joins_group or inside[0].thread_wait.kind in ("collective", "p2p")
    why = f"the {other}, which must be on the other side, was not read"
    return verdict(case, graph, inside, [], why, "medium" if meets else "low")


def absent_engines(case: Case) -> tuple[str, ...]:
    return tuple(name for name in case.snapshot.absent if name.startswith("engine"))


def verdict(
    case: Case, graph: Graph, sides: list[Side], holders: list[Side], why: str, best: Confidence
) -> Verdict:
    """Return the verdict; `holders` are the processes that keep the others waiting."""
    culprits = [s.process for s in holders]
    # One trainer and one engine are two.
    both = replace(case, ranks=tuple(s.process for s in sides))
    if any(s.joins_group for s in sides):
        why += "; the group of the update has not formed: compare its world size and members on both sides"
    return Verdict(
        "weight_sync_deadlock",
        confidence(both, graph, culprits or [s.process for s in sides], best),
        ranks_of(culprits),
        f"Weight update: {'; '.join(clauses(sides))}: {why}.",
        tuple(evidence(side) for side in sides[:8]) + stillness(case),
        STEPS,
        REFUTE,
    )


def clauses(sides: list[Side]) -> list[str]:
    """Return one clause per side and place: which processes wait where."""
    places: dict[tuple[str, str], list[Side]] = {}
    for side in sides:
        places.setdefault((side.role, where(side)), []).append(side)
    return [
        f"{who(role, members)} {'waits' if len(members) == 1 else 'wait'} in {place}"
        for (role, place), members in list(places.items())[:4]
    ]


def who(role: str, members: list[Side]) -> str:
    """Return the role and the ranks; a process of another role is named after it already."""
    names = name_ranks([s.process for s in members])
    return names if names.removeprefix("ranks ").startswith(role) else f"{role} {names}"


def where(side: Side) -> str:
    """Return what a side waits in, and where in its program, as a phrase."""
    thread_wait = side.thread_wait
    frame = thread_wait.chain[0] if thread_wait.chain else thread_wait.frame
    what = thread_wait.operation or thread_wait.kind
    return f"{what} at {show(frame)}" if frame else what


def evidence(side: Side) -> Evidence:
    """Return the place of one side as evidence."""
    frame = side.thread_wait.frame
    return Evidence(
        ranks=str(side.process.rank if side.process.rank is not None else ""),
        fact=f"{side.role}: waits in {where(side)}",
        process=side.process.name,
        thread=side.process.thread,
        frame=frame.function if frame else "",
        location=location_of(frame),
    )
