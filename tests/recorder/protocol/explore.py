"""Explore every order of the operations of several processes, with kills and power failures."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from .disk import Disk, Machine


class Violation(AssertionError):
    """An invariant does not hold; the message ends in the operations that lead there."""


@dataclass(frozen=True)
class World:
    """A state: the disk, per process its history and whether it runs, and what has happened."""

    disk: Disk
    histories: tuple[int, ...]
    killed: frozenset[int]
    marks: frozenset[tuple[Any, ...]]


@dataclass(frozen=True)
class Result:
    """What an exploration went through."""

    states: int
    crashes: int
    outcomes: frozenset[tuple[Any, ...]]


def holders(world: World) -> set[int]:
    """The processes that hold the lock and live."""
    held = {mark[2] for mark in world.marks if mark[1] == "holds"}
    return held - {mark[2] for mark in world.marks if mark[1] == "released"} - world.killed


class Explorer:
    """All reachable states of processes on a disk.

    Args:
        bodies: the code of each process.
        check_op: called with (world, process, operation) before the operation happens.
        check_crash: called with each disk that a power failure may leave, and the marks; None for
            no power failures.
        check_end: called with each world in which nothing can happen any more.
        max_kills: how many processes may be killed.
        extra: further states that follow from a world, with labels.
        may_run: whether a process may make its next operation in a world.
        pids: of the processes that others can find, by default all.
        generation: of the files' names, if the disk is from another exploration.
    """

    def __init__(
        self,
        machine: Machine,
        bodies: list[Callable[[], Any]],
        check_op: Callable[[World, int, tuple[Any, ...]], None] = lambda world, process, op: None,
        check_crash: Callable[[Disk, frozenset[Any]], None] | None = None,
        check_end: Callable[[World, tuple[Any, ...]], None] = lambda world, outcomes: None,
        max_kills: int = 0,
        extra: Callable[[World], list[tuple[str, World]]] = lambda world: [],
        may_run: Callable[[World, int], bool] = lambda world, process: True,
        pids: range | None = None,
        generation: int = 0,
    ) -> None:
        self.generation = generation
        self.pids = range(len(bodies)) if pids is None else pids
        self.machine, self.bodies = machine, bodies
        self.check_op, self.check_crash, self.check_end = check_op, check_crash, check_end
        self.max_kills, self.extra, self.may_run = max_kills, extra, may_run
        # histories as a tree: node -> (parent, result); 0 is the empty one of every process
        self.nodes: list[tuple[int, Any]] = [(0, None)]
        self.children: dict[tuple[int, Any], int] = {}
        self.lengths = [0]
        self.next_ops: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.parents: dict[Hashable, tuple[Hashable, str]] = {}
        self.crashed: set[Hashable] = set()

    def run(self, disk: Disk, marks: frozenset[Any] = frozenset()) -> Result:
        """Explore from a disk. Raises Violation."""
        first = World(disk, (0,) * len(self.bodies), frozenset(), marks)
        seen = {self.key(first)}
        stack, outcomes = [first], set()
        while stack:
            world = stack.pop()
            try:
                self.check_crashes(world)
                following = self.following(world)
                if not following:
                    ends = tuple(
                        "killed" if p in world.killed else self.next_op(p, node)[-1]
                        for p, node in enumerate(world.histories)
                    )
                    self.check_end(world, ends)
                    outcomes.add(ends)
            except Violation as violation:
                raise Violation(f"{violation}\n{self.trace(world)}") from None
            for label, after in following:
                key = self.key(after)
                if key not in seen:
                    seen.add(key)
                    self.parents[key] = (self.key(world), label)
                    stack.append(after)
        return Result(len(seen), len(self.crashed), frozenset(outcomes))

    def following(self, world: World) -> list[tuple[str, World]]:
        """Return each state that one operation or kill leads to."""
        states = []
        running = [p for p in range(len(self.bodies)) if p not in world.killed]
        running = [p for p in running if self.next_op(p, world.histories[p])[0] != "done"]
        for process in running:
            op = self.next_op(process, world.histories[process])
            if len(world.killed) < self.max_kills:
                killed = world.killed | {process}
                states.append((f"kill {process}", World(world.disk, world.histories, killed, world.marks)))
            if not self.may_run(world, process) or not self.is_enabled(world, process, op):
                continue
            self.check_op(world, process, op)
            disk, marks = world.disk, world.marks
            if op[0] == "mark":
                result, marks = None, marks | {(process, *op[1:])}
            elif op[0] == "take" and any(self.is_alive(world, pid) for pid in holders(world) - {process}):
                result = False
            elif op[0] == "await":
                result = op[1] not in disk.names
            else:
                inode = (self.generation, process, self.lengths[world.histories[process]])
                result, disk = disk.apply(op, inode)
            if op[0] == "take" and result:
                marks = marks | {(process, "holds", op[3])}
            histories = list(world.histories)
            histories[process] = self.extend(histories[process], result)
            label = f"{process}: {' '.join(str(item)[:80] for item in op)} -> {str(result)[:60]}"
            states.append((label, World(disk, tuple(histories), world.killed, marks)))
        return states + self.extra(world)

    def is_alive(self, world: World, pid: int) -> bool:
        """Return what another process can know; a PID that is not ours is of a dead process."""
        if pid not in self.pids or pid in world.killed or ("silent", pid) in world.marks:
            return False
        return self.next_op(pid, world.histories[pid])[0] != "done"

    def is_enabled(self, world: World, process: int, op: tuple[Any, ...]) -> bool:
        """A wait for a file ends when it exists, or when no other process can write it."""
        if op[0] != "await" or op[1] in world.disk.names:
            return True
        others = set(range(len(self.bodies))) - {process} - world.killed
        return all(self.next_op(other, world.histories[other])[0] == "done" for other in others)

    def check_crashes(self, world: World) -> None:
        if self.check_crash is None:
            return
        for disk in world.disk.after_crashes():
            key = (disk.key(), world.marks)
            if key not in self.crashed:
                self.crashed.add(key)
                self.check_crash(disk, world.marks)

    def key(self, world: World) -> Hashable:
        return world.disk.key(), world.histories, world.killed, world.marks

    def next_op(self, process: int, node: int) -> tuple[Any, ...]:
        if (process, node) not in self.next_ops:
            history, at = [], node
            while at:
                at, result = self.nodes[at]
                history.append(result)
            self.next_ops[process, node] = self.machine.next_op(self.bodies[process], history[::-1])
        return self.next_ops[process, node]

    def extend(self, node: int, result: Any) -> int:
        if (node, result) not in self.children:
            self.children[node, result] = len(self.nodes)
            self.nodes.append((node, result))
            self.lengths.append(self.lengths[node] + 1)
        return self.children[node, result]

    def trace(self, world: World) -> str:
        """The operations from the first state to this one."""
        labels, key = [], self.key(world)
        while key in self.parents:
            key, label = self.parents[key]
            labels.append(label)
        return "\n".join(labels[::-1])
