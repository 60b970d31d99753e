"""Equivalence classes: ranks whose main threads stand at the same place, their ranges, and where they part.

The tree is that of STAT (LLNL): stacks merged from the outside in, every branch with the ranks that took it;
the first branch below the common prefix is where the ranks' ways part.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hangdoctor.case import Standing
from hangdoctor.frames import python_only
from hangdoctor.model import Frame, Rank


@dataclass(frozen=True, slots=True)
class StackClass:
    """Processes with one stack. `frames` are normalised Python frames, innermost first."""

    members: tuple[Standing, ...]
    frames: tuple[Frame, ...]

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(m.rank for m in self.members if m.rank is not None)


@dataclass(frozen=True, slots=True)
class Branch:
    """A node of the merged tree: a frame, the ranks that pass through it, and what they call next."""

    frame: Frame
    ranks: tuple[Rank, ...]
    children: tuple["Branch", ...]
    ending: tuple[Rank, ...]


def rank_ranges(ranks: Iterable[Rank]) -> str:
    """`0-2,5-7` for numbers; names follow as they are, the first twenty of them."""
    given = list(ranks)
    numbers = sorted({rank for rank in given if isinstance(rank, int)})
    parts, start = [], 0
    for i, number in enumerate(numbers):
        if i + 1 == len(numbers) or numbers[i + 1] != number + 1:
            parts.append(f"{numbers[start]}-{number}" if i > start else f"{number}")
            start = i + 1
    names = sorted({rank for rank in given if isinstance(rank, str)})
    return ",".join([*parts, *names[:20], *(["..."] if len(names) > 20 else [])])


def stack_classes(standings: Sequence[Standing]) -> tuple[StackClass, ...]:
    """Classes by what is waited for and the Python stack, largest first, then by lowest rank."""
    members: dict[tuple[str, int], list[Standing]] = defaultdict(list)
    stacks: dict[tuple[Frame, ...], int] = {}
    by_identity: dict[int, int] = {}
    for standing in standings:
        frames = standing.stance.frames
        if id(frames) not in by_identity:
            by_identity[id(frames)] = stacks.setdefault(python_only(frames), len(stacks))
        members[(standing.stance.kind, by_identity[id(frames)])].append(standing)
    found = [StackClass(tuple(group), python_only(group[0].stance.frames)) for group in members.values()]
    return tuple(sorted(found, key=lambda c: (-len(c.members), str(c.ranks[:1]).rjust(12))))


def common_prefix(stacks: Sequence[Sequence[Frame]]) -> int:
    """How many outermost frames all stacks share, lines included."""
    if not stacks:
        return 0
    depth = 0
    shortest = min(len(stack) for stack in stacks)
    while depth < shortest and len({stack[-1 - depth] for stack in stacks}) == 1:
        depth += 1
    return depth


def first_divergent(stack: Sequence[Frame], others: Sequence[Sequence[Frame]]) -> Frame | None:
    """The outermost frame of `stack` that differs from the way all `others` took; None where it lies on their way."""
    depth = common_prefix([stack, *others])
    return stack[-1 - depth] if depth < len(stack) else None


def merged_tree(classes: Sequence[StackClass], depth: int = 0) -> tuple[Branch, ...]:
    """The prefix tree of all classes, from the outermost frame in; branches in order of size."""
    by_frame: dict[Frame, list[StackClass]] = defaultdict(list)
    for stack_class in classes:
        if depth < len(stack_class.frames) and depth < 400:
            by_frame[stack_class.frames[-1 - depth]].append(stack_class)
    branches = [
        Branch(
            frame=frame,
            ranks=tuple(rank for c in group for rank in c.ranks),
            children=merged_tree(group, depth + 1),
            ending=tuple(rank for c in group if len(c.frames) == depth + 1 for rank in c.ranks),
        )
        for frame, group in by_frame.items()
    ]
    return tuple(sorted(branches, key=lambda branch: -len(branch.ranks)))
