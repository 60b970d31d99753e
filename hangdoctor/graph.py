"""The wait-for graph of the ranks. Ranks that wait for no other rank are the sources: the culprits.

    rank in a collective  ->  every rank that has not reached it
    rank in send/recv     ->  its peer, or every rank that is not there either
    rank in anything else ->  no rank of the job: a source (reported with its child, engine, lock, file)

Nodes are clusters of ranks that wait at the same place, so that 100,000 ranks are a few nodes.
"""

from collections import defaultdict
from dataclasses import dataclass

from hangdoctor.case import Case, ProcessState
from hangdoctor.frames import ENTRIES
from hangdoctor.groups import rank_ranges
from hangdoctor.model import Frame
from hangdoctor.tables import EVENT_LOOP, ROOTED
from hangdoctor.waits import ThreadWait

WEB_SERVERS = (
    "uvicorn/",
    "hypercorn/",
    "gunicorn/",
    "fastapi/",
    "starlette/",
    "aiohttp/web",
    "vllm/entrypoints/",
    "sglang/srt/entrypoints/",
)
# More places than this are compared by their complete stacks only.
MAX_PLACES = 200
# Waits that may be for a child process.
CHILD_KINDS = ("data", "subprocess", "join", "future", "queue")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks that wait for the same thing at the same place of the program."""

    members: tuple[ProcessState, ...]
    thread_wait: ThreadWait
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
    def source_ranks(self) -> tuple[ProcessState, ...]:
        return tuple(member for cluster in self.sources for member in cluster.members)

    @property
    def waiting_ranks(self) -> tuple[ProcessState, ...]:
        return tuple(member for cluster in self.waiting for member in cluster.members)


def wait_for_graph(case: Case) -> Graph:
    """Return the clusters of the case's ranks, largest first, and the edges between them.

    The event loop of a server beside ranks that wait only serves requests: it is no source.
    """
    clusters = cluster(case.ranks)
    waiting = tuple(c for c in clusters if c.thread_wait.waits_for_peers)
    others = [c for c in clusters if not c.thread_wait.waits_for_peers]
    sources = tuple(c for c in others if not (waiting and serves(c.thread_wait)))
    return Graph(waiting, sources, edges_between(case, waiting, sources))


def serves(thread_wait: ThreadWait) -> bool:
    """True for the event loop of a web server: it waits for requests, whatever the ranks do."""
    return thread_wait.operation == EVENT_LOOP and any(
        frame.file.startswith(WEB_SERVERS) for frame in thread_wait.frames
    )


def cluster(ranks: tuple[ProcessState, ...]) -> tuple[Cluster, ...]:
    """Group ranks by (kind, operation, path to the wait); root and others of a rooted collective
    are joined although they differ by a line.
    """
    by_place: dict[tuple[str, str, tuple[Frame, ...]], list[ProcessState]] = defaultdict(list)
    paths: dict[int, tuple[Frame, ...]] = {}
    for process_state in ranks:
        thread_wait = process_state.thread_wait
        if id(thread_wait) not in paths:
            paths[id(thread_wait)] = path_to(thread_wait)
        by_place[(thread_wait.kind, thread_wait.operation, paths[id(thread_wait)])].append(process_state)
    joined: dict[object, list[ProcessState]] = {}
    for (kind, operation, path), members in by_place.items():
        joined.setdefault((kind, operation, place_key(operation, path)), []).extend(members)
    found = [
        Cluster(tuple(members), members[0].thread_wait, path_to(members[0].thread_wait))
        for members in with_excerpts(list(joined.values()))
    ]
    return tuple(sorted(found, key=lambda c: (-len(c.members), c.ranks)))


def with_excerpts(groups: list[list[ProcessState]]) -> list[list[ProcessState]]:
    """Join each group whose stack was cut before its outer frames with one that continues it."""
    if len(groups) > MAX_PLACES:
        return groups
    complete: list[list[ProcessState]] = []
    for members in sorted(groups, key=lambda group: -len(path_to(group[0].thread_wait))):
        wait = members[0].thread_wait
        path = path_to(wait)
        cut = bool(path) and not any(frame.function in ENTRIES for frame in path)
        home = next(
            (
                group
                for group in complete
                if cut
                and wait.waits_for_peers
                and (other := group[0].thread_wait).kind == wait.kind
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


def path_to(thread_wait: ThreadWait) -> tuple[Frame, ...]:
    """Return the calls that led to the wait, innermost first, without the frames inside the waiting
    library.
    """
    python = thread_wait.python
    if thread_wait.frame in python and thread_wait.kind in ("collective", "p2p"):
        inside_library = thread_wait.frame not in thread_wait.chain
        return python[python.index(thread_wait.frame) + inside_library :]
    return thread_wait.chain or python


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
        what = f"{waiter.thread_wait.operation or waiter.thread_wait.kind}"
        targets = [s.ranks for s in sources[:50]] or [w.ranks for w in waiting[:50] if w is not waiter]
        edges += [Edge(waiter.ranks, target, f"has not reached {what}") for target in targets]
        if missing:
            edges.append(Edge(waiter.ranks, missing, f"is missing in {what}"))
    for source in [s for s in sources[:50] if s.thread_wait.kind in CHILD_KINDS]:
        for member in source.members[:5]:
            edges += [
                Edge(str(member.rank), child.name, "it started") for child in case.children_of(member.name)
            ]
    return tuple(edges)


def same_place(clusters: tuple[Cluster, ...]) -> bool:
    """Return whether all waiting ranks may be in the same operation.

    A wait for the device hides which collective the device is in, so it agrees with any.
    """
    named = [c for c in clusters if c.thread_wait.kind != "device"]
    return len(named) <= 1
