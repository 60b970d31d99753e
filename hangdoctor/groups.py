"""Equivalence classes: ranks whose main threads are at the same place, their ranges, and where they
diverge.

Stacks are compared from the outermost frame in, as in STAT (LLNL): the first frame below the common
prefix is where the ranks diverge.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hangdoctor.case import ProcessState
from hangdoctor.model import Frame, Rank


@dataclass(frozen=True, slots=True)
class StackClass:
    """Processes with one stack. `frames` are normalised Python frames, innermost first."""

    members: tuple[ProcessState, ...]
    frames: tuple[Frame, ...]

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks of the class."""
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


def stack_classes(process_states: Sequence[ProcessState]) -> tuple[StackClass, ...]:
    """Group processes by wait and Python stack, largest class first, then by lowest rank."""
    members: dict[tuple[str, int], list[ProcessState]] = defaultdict(list)
    stacks: dict[tuple[Frame, ...], int] = {}
    by_identity: dict[int, int] = {}
    for process_state in process_states:
        frames = process_state.thread_wait.frames
        if id(frames) not in by_identity:
            by_identity[id(frames)] = stacks.setdefault(process_state.thread_wait.python, len(stacks))
        members[(process_state.thread_wait.kind, by_identity[id(frames)])].append(process_state)
    found = [StackClass(tuple(group), group[0].thread_wait.python) for group in members.values()]
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
