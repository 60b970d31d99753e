"""The rule for a weight update of RL, whose two sides wait for each other.

A process takes its side from its role (an engine by name or command) or, without one, from the
functions and files on its stacks. Names are matched by their words, so that a library's next
version, or a program of one's own, needs no row here.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from hangdoctor.case import Case, Process
from hangdoctor.frames import TABLES, is_library, show
from hangdoctor.graph import Graph, same_place
from hangdoctor.model import Confidence, Frame
from hangdoctor.rules.verdict import Verdict, confidence, evidence_of, make_verdict, name_ranks, stillness
from hangdoctor.tables import pattern
from hangdoctor.waits import Wait

UPDATE_NAMES, UPDATE_FILES, GROUP_NAMES, PAUSE_NAMES = (
    pattern(TABLES["weight_update"][name]) for name in ("names", "files", "groups", "pauses")
)
ENGINE_WORDS, TRAINER_WORDS, RECEIVE_WORDS, SEND_WORDS = (
    pattern(TABLES["weight_update"][name]) for name in ("engine", "trainer", "receive", "send")
)
ROLES_APART = ("engine", "reference", "reward", "proxy", "critic")
WAITS = (
    "collective", "p2p", "store", "http", "rpc", "future", "queue", "event", "lock", "socket", "sleep", "idle",
    "device", "blocked", "join",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Side:
    """One process in, or opposite to, an update; `wait` is of the thread that shows it."""

    process: Process
    wait: Wait
    is_engine: bool
    updates: bool

    @property
    def role(self) -> str:
        """`engine` or `trainer`."""
        return "engine" if self.is_engine else "trainer"

    @property
    def joins_group(self) -> bool:
        """True if it waits for the group of the update to form."""
        names = any(GROUP_NAMES.fullmatch(f.function) for f in self.wait.frames)
        return names and self.wait.kind in ("store", "collective", "http", "rpc")

    @property
    def pauses(self) -> Frame | None:
        """The frame that waits for a pause to begin or to end, or None."""
        found = (f for f in self.wait.frames if not f.native and PAUSE_NAMES.fullmatch(f.function))
        return next(found, None)


@lru_cache(maxsize=65536)
def updates(frame: Frame) -> bool:
    """True if a frame belongs to a weight update: by its name, or by its file where that is a
    library's (a program of that name is in it with every frame).
    """
    if frame.native or frame.file.startswith(("torch/", "transformers/")):
        return False
    in_library = is_library(frame.file) or frame.file.startswith(("areal", "rollout/fleet"))
    return bool(UPDATE_NAMES.fullmatch(frame.function) or (in_library and UPDATE_FILES.fullmatch(frame.file)))


def sides_of(case: Case) -> tuple[Side, ...]:
    """Return every process of the job with its side. Stacks that are one object are judged once."""
    processes = [*case.ranks, *(s for s in case.others if s.role not in ("child", "launcher") and s.threads)]
    waits = {id(w.frames): w for s in processes for w in (s.wait, *(t.wait for t in s.threads))}
    updating = {key for key, wait in waits.items() if any(map(updates, wait.frames))}
    files = [{f.file for f in waits[key].frames} for key in {id(s.wait.frames) for s in processes}]
    shared = frozenset(set.intersection(*files)) if len(processes) > 1 else frozenset()
    named = any(s.role in ROLES_APART for s in processes)
    known: dict[tuple[int, int, str], Side] = {}
    sides = []
    for s in processes:
        key = (id(s.wait), id(s.threads), s.role)
        if key not in known:
            known[key] = side_of(s, updating, shared, named)
        sides.append(replace(known[key], process=s))
    return tuple(sides)


def side_of(process: Process, updating: set[int], shared: frozenset[str], named: bool) -> Side:
    """Return the side of one process, by the thread that is in an update where there is one.

    `updating` are the stacks that are in one, `shared` the files that every process runs: they
    distinguish none. `named` says that the processes have roles.
    """
    waits = (process.wait, *(t.wait for t in process.threads))
    found = next((w for w in waits if id(w.frames) in updating), None)
    wait = found or process.wait
    engine = process.role == "engine" if named else is_engine(wait, shared)
    return Side(process, wait, engine, found is not None)


def is_engine(wait: Wait, shared: frozenset[str]) -> bool:
    """True for a stack that generates: by the way the weights go, by an engine's own files, else by
    the words of its functions and then of its files.
    """
    frames = [f for f in wait.frames if not f.native and not f.file.startswith("torch/")]
    sync = " ".join(f.function for f in frames if updates(f))
    receives, sends = RECEIVE_WORDS.search(sync), SEND_WORDS.search(sync)
    if bool(receives) != bool(sends):
        return bool(receives)
    files = " ".join(f.file for f in frames if f.file not in shared)
    if re.search(r"\b(vllm|sglang)/", files):
        return not re.search(r"\b(trl|verl/trainer|nemo_rl/algorithms)/", files)
    functions = " ".join(f.function for f in frames)
    # A trainer's own file has functions that generate.
    elsewhere = " ".join(f.function for f in frames if not TRAINER_WORDS.search(f.file))
    for words, own in ((functions, elsewhere), (files, files)):
        generates, trains = ENGINE_WORDS.search(own), TRAINER_WORDS.search(words)
        if bool(generates) != bool(trains):
            return bool(generates)
    return False


def weight_sync_deadlock(case: Case, graph: Graph) -> Verdict | None:
    sides = sides_of(case)
    inside = [s for s in sides if s.updates and s.wait.kind in WAITS and not s.process.moved]
    if not inside or any(s.process.wait.phases & {"error", "cleanup"} for s in sides):
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
    outside = [s for s in inside if s.wait.kind not in ("collective", "p2p", "store", "device")]
    apart = {s.wait.kind in ("collective", "p2p", "device") for s in inside} == {True, False}
    holders = outside if apart else []
    why = (
        "the two sides wait for different things"
        if len({s.wait.operation for s in inside}) > 1
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
    if absent := tuple(name for name in case.snapshot.absent if name.startswith("engine")):
        names = ", ".join(absent[:4])
        why = f"{names} {'is' if len(absent) == 1 else 'are'} on the other side and {case.snapshot.absent[absent[0]].replace('_', ' ')}"
        return replace(verdict(case, graph, inside, [], why, "high"), culprits=absent)
    if len(case.ranks) > 1 and len(waiting) == len(case.ranks) and same_place(graph.waiting):
        return None
    other = "engine" if not inside[0].is_engine else "trainer"
    meets = inside[0].joins_group or inside[0].wait.kind in ("collective", "p2p")
    why = f"the {other}, which must be on the other side, was not read"
    return verdict(case, graph, inside, [], why, "medium" if meets else "low")


def verdict(
    case: Case, graph: Graph, sides: list[Side], holders: list[Side], why: str, best: Confidence
) -> Verdict:
    """Return the verdict; `holders` are the processes that keep the others waiting."""
    culprits = [s.process for s in holders]
    # One trainer and one engine are two.
    both = replace(case, ranks=tuple(s.process for s in sides))
    if any(s.joins_group for s in sides):
        why += "; the group of the update has not formed: compare its world size and members on both sides"
    evidence = tuple(
        evidence_of(s.process, f"{s.role}: waits in {where(s)}", s.process.thread, s.wait.frame)
        for s in sides[:8]
    )
    return make_verdict(
        "weight_sync_deadlock",
        confidence(both, graph, culprits or [s.process for s in sides], best),
        culprits,
        f"Weight update: {'; '.join(clauses(sides))}: {why}.",
        evidence + stillness(case),
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
    wait = side.wait
    frame = wait.chain[0] if wait.chain else wait.frame
    what = wait.operation or wait.kind
    return f"{what} at {show(frame)}" if frame else what
