"""Who waits for whom. Ranks that nobody can blame further are the sources: culprits; the rest are their
victims.

    rank in a collective  ->  every rank that has not come to it
    rank in send/recv     ->  its peer, or every rank that is not there either
    rank in anything else ->  nobody of the job: a source (its child, engine, lock or file is named beside it)

Nodes are clusters of ranks that wait at the same place, so that a hundred thousand ranks are a handful of
nodes.
"""

from collections import defaultdict
from dataclasses import dataclass

from hangdoctor.case import Case, Standing
from hangdoctor.frames import python_only
from hangdoctor.groups import rank_ranges
from hangdoctor.model import Frame
from hangdoctor.patterns import ROOTED
from hangdoctor.waits import Stance

# Waits that a child process can be meant by.
CHILD_KINDS = ("data", "subprocess", "join", "future", "queue")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks that wait for the same thing at the same place of the program."""

    members: tuple[Standing, ...]
    stance: Stance
    path: tuple[Frame, ...]

    @property
    def ranks(self) -> str:
        return rank_ranges(m.rank for m in self.members if m.rank is not None)


@dataclass(frozen=True, slots=True)
class Edge:
    """`source` waits for `target`, which `reason`; both are rank ranges or process names."""

    source: str
    target: str
    reason: str


@dataclass(frozen=True, slots=True)
class Graph:
    """`waiting` clusters need other ranks to go on, `sources` do not; `edges` say which needs which."""

    waiting: tuple[Cluster, ...]
    sources: tuple[Cluster, ...]
    edges: tuple[Edge, ...]

    @property
    def source_ranks(self) -> tuple[Standing, ...]:
        return tuple(member for cluster in self.sources for member in cluster.members)

    @property
    def waiting_ranks(self) -> tuple[Standing, ...]:
        return tuple(member for cluster in self.waiting for member in cluster.members)


def wait_for_graph(case: Case) -> Graph:
    """Clusters of the case's ranks, largest first, and the edges between them."""
    clusters = cluster(case.ranks)
    waiting = tuple(c for c in clusters if c.stance.waits_for_peers)
    sources = tuple(c for c in clusters if not c.stance.waits_for_peers)
    return Graph(waiting, sources, edges_between(case, waiting, sources))


def cluster(ranks: tuple[Standing, ...]) -> tuple[Cluster, ...]:
    """Ranks by (kind, operation, path to the wait), then joined where a root and the others differ by a line only."""
    by_place: dict[tuple[str, str, tuple[Frame, ...]], list[Standing]] = defaultdict(list)
    paths: dict[int, tuple[Frame, ...]] = {}
    for standing in ranks:
        stance = standing.stance
        if id(stance) not in paths:
            paths[id(stance)] = path_to(stance)
        by_place[(stance.kind, stance.operation, paths[id(stance)])].append(standing)
    joined: dict[object, list[Standing]] = {}
    for (kind, operation, path), members in by_place.items():
        joined.setdefault((kind, operation, place_key(operation, path)), []).extend(members)
    found = [
        Cluster(tuple(members), members[0].stance, path_to(members[0].stance)) for members in joined.values()
    ]
    return tuple(sorted(found, key=lambda c: (-len(c.members), c.ranks)))


def path_to(stance: Stance) -> tuple[Frame, ...]:
    """The calls that led to the wait, innermost first, without what the waiting library does inside it."""
    python = python_only(stance.frames)
    if stance.frame in python and stance.kind in ("collective", "p2p"):
        inside_library = stance.frame not in stance.chain
        return python[python.index(stance.frame) + inside_library :]
    return stance.chain or python


def place_key(operation: str, path: tuple[Frame, ...]) -> object:
    """What makes two waits the same place: in a rooted collective root and others stand on different lines."""
    if operation in ROOTED or "object" in operation:
        return tuple((frame.function, frame.file) for frame in path)
    return path


def edges_between(case: Case, waiting: tuple[Cluster, ...], sources: tuple[Cluster, ...]) -> tuple[Edge, ...]:
    edges = []
    missing = rank_ranges(case.missing)
    for waiter in waiting[:50]:
        what = f"{waiter.stance.operation or waiter.stance.kind}"
        targets = [s.ranks for s in sources[:50]] or [w.ranks for w in waiting[:50] if w is not waiter]
        edges += [Edge(waiter.ranks, target, f"has not come to {what}") for target in targets]
        if missing:
            edges.append(Edge(waiter.ranks, missing, f"is missing in {what}"))
    for source in [s for s in sources[:50] if s.stance.kind in CHILD_KINDS]:
        for member in source.members[:5]:
            edges += [
                Edge(str(member.rank), child.name, "it started") for child in case.children_of(member.name)
            ]
    return tuple(edges)


def same_place(clusters: tuple[Cluster, ...]) -> bool:
    """Whether all waiting ranks may be in one and the same operation.

    A wait for the device hides which collective the device is in, so it agrees with any.
    """
    named = [c for c in clusters if c.stance.kind != "device"]
    return len(named) <= 1
