"""Equivalence classes: ranks whose main threads are at the same place, their ranges, and where they
diverge.

Stacks are compared from the outermost frame in, as in STAT (LLNL): the first frame below the common
prefix is where the ranks diverge.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hangdoctor.case import Case, Process
from hangdoctor.frames import ENTRIES, TABLES
from hangdoctor.model import Frame, Rank
from hangdoctor.tables import EVENT_LOOP, ROOTED
from hangdoctor.waits import Wait


@dataclass(frozen=True, slots=True)
class StackClass:
    """Processes with one stack. `frames` are normalised Python frames, innermost first."""

    members: tuple[Process, ...]
    frames: tuple[Frame, ...]

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(m.rank for m in self.members if m.rank is not None)


def rank_ranges(ranks: Iterable[Rank]) -> str:
    """Format ranks as `0-2,5-7`; names follow unchanged, the first twenty of them."""
    given = list(ranks)
    numbers = sorted({rank for rank in given if isinstance(rank, int)})
    parts, start = [], 0
    for i, number in enumerate(numbers):
        if i + 1 == len(numbers) or numbers[i + 1] != number + 1:
            parts.append(f"{numbers[start]}-{number}" if i > start else f"{number}")
            start = i + 1
    names = sorted({rank for rank in given if isinstance(rank, str)})
    return ",".join([*parts, *names[:20], *(["..."] if len(names) > 20 else [])])


def stack_classes(processes: Sequence[Process]) -> tuple[StackClass, ...]:
    """Group processes by wait and Python stack, largest class first, then by lowest rank."""
    members: dict[tuple[str, int], list[Process]] = defaultdict(list)
    stacks: dict[tuple[Frame, ...], int] = {}
    by_identity: dict[int, int] = {}
    for process in processes:
        frames = process.wait.frames
        if id(frames) not in by_identity:
            by_identity[id(frames)] = stacks.setdefault(process.wait.python, len(stacks))
        members[(process.wait.kind, by_identity[id(frames)])].append(process)
    found = [StackClass(tuple(group), group[0].wait.python) for group in members.values()]
    return tuple(sorted(found, key=lambda c: (-len(c.members), str(c.ranks[:1]).rjust(12))))


def common_prefix(stacks: Sequence[Sequence[Frame]]) -> int:
    """Return how many outermost frames all stacks share, lines included."""
    if not stacks:
        return 0
    depth = 0
    shortest = min(len(stack) for stack in stacks)
    while depth < shortest and len({stack[-1 - depth] for stack in stacks}) == 1:
        depth += 1
    return depth


def first_divergent(stack: Sequence[Frame], others: Sequence[Sequence[Frame]]) -> Frame | None:
    """Return the outermost frame of `stack` that differs from the path of all `others`, or None
    where it lies on their path.
    """
    depth = common_prefix([stack, *others])
    return stack[-1 - depth] if depth < len(stack) else None


WEB_SERVERS = tuple(TABLES["calls"]["web_servers"])
# More places than this are compared by their complete stacks only.
MAX_PLACES = 200
# Waits that may be for a child process.
CHILD_KINDS = ("data", "subprocess", "join", "future", "queue")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks that wait for the same thing at the same place of the program."""

    members: tuple[Process, ...]
    wait: Wait
    path: tuple[Frame, ...]

    @property
    def ranks(self) -> str:
        """The ranks of the cluster as ranges."""
        return rank_ranges(m.rank for m in self.members if m.rank is not None)


@dataclass(frozen=True, slots=True)
class Edge:
    """`source` waits for `target`, for `reason`; both are rank ranges or process names."""

    source: str
    target: str
    reason: str


@dataclass(frozen=True, slots=True)
class Graph:
    """`waiting` clusters need other ranks to continue, `sources` do not; `edges` connect them."""

    waiting: tuple[Cluster, ...]
    sources: tuple[Cluster, ...]
    edges: tuple[Edge, ...]

    @property
    def source_ranks(self) -> tuple[Process, ...]:
        return tuple(member for cluster in self.sources for member in cluster.members)

    @property
    def waiting_ranks(self) -> tuple[Process, ...]:
        return tuple(member for cluster in self.waiting for member in cluster.members)


def wait_for_graph(case: Case) -> Graph:
    """Return the clusters of the case's ranks, largest first, and the edges between them.

    The event loop of a server beside ranks that wait only serves requests: it is no source.
    """
    clusters = cluster(case.ranks)
    waiting = tuple(c for c in clusters if c.wait.waits_for_peers)
    others = [c for c in clusters if not c.wait.waits_for_peers]
    sources = tuple(c for c in others if not (waiting and serves(c.wait)))
    return Graph(waiting, sources, edges_between(case, waiting, sources))


def serves(wait: Wait) -> bool:
    """True for the event loop of a web server: it waits for requests, whatever the ranks do."""
    return wait.operation == EVENT_LOOP and any(frame.file.startswith(WEB_SERVERS) for frame in wait.frames)


def cluster(ranks: tuple[Process, ...]) -> tuple[Cluster, ...]:
    """Group ranks by (kind, operation, path to the wait); root and others of a rooted collective
    are joined although they differ by a line.
    """
    by_place: dict[tuple[str, str, tuple[Frame, ...]], list[Process]] = defaultdict(list)
    paths: dict[int, tuple[Frame, ...]] = {}
    for process in ranks:
        wait = process.wait
        if id(wait) not in paths:
            paths[id(wait)] = path_to(wait)
        by_place[(wait.kind, wait.operation, paths[id(wait)])].append(process)
    joined: dict[object, list[Process]] = {}
    for (kind, operation, path), members in by_place.items():
        joined.setdefault((kind, operation, place_key(operation, path)), []).extend(members)
    found = [
        Cluster(tuple(members), members[0].wait, path_to(members[0].wait))
        for members in with_excerpts(list(joined.values()))
    ]
    return tuple(sorted(found, key=lambda c: (-len(c.members), c.ranks)))


def with_excerpts(groups: list[list[Process]]) -> list[list[Process]]:
    """Join each group whose stack was cut before its outer frames with one that continues it."""
    if len(groups) > MAX_PLACES:
        return groups
    complete: list[list[Process]] = []
    for members in sorted(groups, key=lambda group: -len(path_to(group[0].wait))):
        wait = members[0].wait
        path = path_to(wait)
        cut = bool(path) and not any(frame.function in ENTRIES for frame in path)
        home = next(
            (
                group
                for group in complete
                if cut
                and wait.waits_for_peers
                and (other := group[0].wait).kind == wait.kind
                and other.operation == wait.operation
                and path_to(other)[: len(path)] == path
            ),
            None,
        )
        if home is None:
            complete.append(members)
        else:
            home.extend(members)
    return complete


def path_to(wait: Wait) -> tuple[Frame, ...]:
    """Return the calls that led to the wait, innermost first, without the frames inside the waiting
    library.
    """
    python = wait.python
    if wait.frame in python and wait.kind in ("collective", "p2p"):
        inside_library = wait.frame not in wait.chain
        return python[python.index(wait.frame) + inside_library :]
    return wait.chain or python


def place_key(operation: str, path: tuple[Frame, ...]) -> object:
    """Return the key that makes two waits the same place: in a rooted collective, root and others
    are on different lines.
    """
    if operation in ROOTED or "object" in operation:
        return tuple((frame.function, frame.file) for frame in path)
    return path


def edges_between(case: Case, waiting: tuple[Cluster, ...], sources: tuple[Cluster, ...]) -> tuple[Edge, ...]:
    """Return the edges from waiting clusters to sources and missing ranks, and from sources to
    their children.
    """
    edges = []
    missing = rank_ranges(case.lost)
    for waiter in waiting[:50]:
        what = f"{waiter.wait.operation or waiter.wait.kind}"
        targets = [s.ranks for s in sources[:50]] or [w.ranks for w in waiting[:50] if w is not waiter]
        edges += [Edge(waiter.ranks, target, f"has not reached {what}") for target in targets]
        if missing:
            edges.append(Edge(waiter.ranks, missing, f"is missing in {what}"))
    for source in [s for s in sources[:50] if s.wait.kind in CHILD_KINDS]:
        for member in source.members[:5]:
            edges += [
                Edge(str(member.rank), child.name, "it started") for child in case.children_of(member.name)
            ]
    return tuple(edges)


def same_place(clusters: tuple[Cluster, ...]) -> bool:
    """Return whether all waiting ranks may be in the same operation.

    A wait for the device hides which collective the device is in, so it agrees with any.
    """
    named = [c for c in clusters if c.wait.kind != "device"]
    return len(named) <= 1
