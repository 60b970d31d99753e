"""The chain from step to step, and the end mark: no step can be missing without a trace.

    step.json 0          step.json 1               step.json 3                  end.json
    previous: null  <──  previous: 0, sha256  <──  previous: 1, sha256  <──  last: 3, sha256

`previous` is the step that was committed before; its step.json is what the sha256 covers, byte for
byte. Where retention removed that step, gaps.json has its number, and the link leads nowhere.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from areal_core.safety.durable import commit_file
from recorder.documents import checksummed_bytes
from recorder.format import (
    END_FILE,
    FORMAT_VERSION,
    STEP_FILE,
    STEPS_FOLDER,
    EndMark,
    Recording,
    StepLink,
    step_name,
)
from recorder.header import Gaps, Ranges, in_ranges

MOST_MISSING = 1000  # missing steps that are listed


def link_to(record: Path, step: int) -> StepLink:
    data = (record / STEPS_FOLDER / step_name(step) / STEP_FILE).read_bytes()
    return StepLink(step, hashlib.sha256(data).hexdigest())


def write_end(record: Path, finished: bool, last: StepLink | None) -> None:
    """Commit end.json: nothing is recorded after `last`."""
    commit_file(record / END_FILE, checksummed_bytes(vars(EndMark(FORMAT_VERSION, finished, last))))


@dataclass(frozen=True)
class Linked:
    """What a committed step says of its place in the chain; `sha256` is of its step.json."""

    step: int
    version: int
    format_version: int
    previous: StepLink | None
    sha256: str


class Chain:
    """Follow the links of committed steps in ascending order.

    Attributes:
        absent: steps that others are linked to and that are neither there nor removed.
    """

    def __init__(self, gaps: Gaps) -> None:
        self.gaps = gaps
        self.absent: set[int] = set()
        self.before: StepLink | None = None
        self.version = 0
        self.is_linked = False  # a step of format 2 or later has been seen
        self.is_unknown = False  # the step before could not be read

    def skip(self) -> None:
        """Pass a step whose step.json cannot be read."""
        self.before, self.is_unknown = None, True

    def follow(self, linked: Linked) -> Iterator[str]:
        """Pass a step; yield what contradicts the steps before it."""
        step, before, is_unknown = linked.step, self.before, self.is_unknown
        if linked.version < self.version:
            yield f"has weight version {linked.version}, and a step before it {self.version}"
        self.before, self.is_unknown, self.version = StepLink(step, linked.sha256), False, linked.version
        if linked.format_version == 1:
            if self.is_linked:
                yield "has format version 1 after steps of version 2"
            return
        self.is_linked = True
        if linked.previous is not None or before is not None:
            yield from self.check_link(f"step {step}", step, linked.previous, before, is_unknown)

    def check_end(self, end: EndMark) -> Iterator[str]:
        if end.last is not None or self.before is not None:
            yield from self.check_link(
                "the end", end.last.step + 1 if end.last else 0, end.last, self.before, self.is_unknown
            )

    def check_link(
        self, name: str, after: int, link: StepLink | None, before: StepLink | None, is_unknown: bool
    ) -> Iterator[str]:
        if link is None:
            assert before is not None
            yield f"{name} is linked to no step, but step {before.step} comes before it"
        elif link.step >= after:
            yield f"{name} is linked to step {link.step}, which cannot come before it"
        elif before is not None and link.step == before.step:
            if link.sha256 != before.sha256:
                yield f"{name} is linked to another step {link.step} than the one here (sha256 of its step.json)"
        elif before is not None and link.step < before.step:
            yield f"{name} is linked to step {link.step}, but step {before.step} is between them"
        elif not is_unknown and not in_ranges(link.step, self.gaps.removed):
            self.absent.add(link.step)


def missing_steps(present: Sequence[int], absent: set[int], recording: Recording, gaps: Gaps) -> list[int]:
    """List steps that should be recorded and are in no gap, ascending, at most `MOST_MISSING`.

    Args:
        present: step folders, ascending.
        absent: steps that others are linked to; every step between these and `present` counts, too.
    """
    ends = [*present[:1], *present[-1:], *absent]
    if not ends:
        return []
    if recording.scope == "given":  # nobody knows which other steps the trainer gave
        return sorted(absent)[:MOST_MISSING]
    known, chosen = {*gaps.dropped, *gaps.lost}, sorted(recording.steps or ())
    missing: list[int] = []
    for before, after in pairwise([min(ends) - 1, *present, max(ends) + 1]):
        for low, high in without_ranges(before + 1, after - 1, gaps.removed):
            wanted: Sequence[int] = range(
                -(-low // recording.every) * recording.every, high + 1, recording.every
            )
            if recording.steps is not None:
                wanted = chosen[bisect_left(chosen, low) : bisect_right(chosen, high)]
            for step in wanted:
                if step not in known:
                    missing.append(step)
                if len(missing) == MOST_MISSING:
                    return missing
    return missing


def without_ranges(low: int, high: int, ranges: Ranges) -> Iterator[tuple[int, int]]:
    first = max(0, bisect_right(ranges, low, key=lambda ends: ends[0]) - 1)
    for begin, end in ranges[first : bisect_right(ranges, high, key=lambda ends: ends[0])]:
        if low < begin:
            yield low, begin - 1
        low = max(low, end + 1)
    if low <= high:
        yield low, high
