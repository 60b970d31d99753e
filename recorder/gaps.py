"""Steps that a record lacks for a known reason: retention, a slow disk, or an interrupted run.

Any other missing step is damage. `gaps.json` is committed before a step is removed, so that no step
is ever missing without its reason.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recorder.format import FORMAT_VERSION, GAPS_FILE, check_version, fields_of
from recorder.sealed import checksummed_bytes, commit_file

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Gaps:
    """`removed` are ascending ranges, both ends included; `dropped` and `lost` are single steps."""

    removed: Ranges = ()
    dropped: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()

    def reason(self, step: int) -> str | None:
        """Return the reason why the step is missing, or None if it is unknown."""
        if in_ranges(step, self.removed):
            return "was removed to keep the record within its limits"
        if step in self.dropped:
            return "was dropped because the disk was slower than the run"
        return "was not written before the run was interrupted" if step in self.lost else None

    def with_removed(self, steps: Iterable[int]) -> "Gaps":
        """Return these gaps plus steps that are about to be removed."""
        return replace(self, removed=merge_ranges([*self.removed, *((step, step) for step in steps)]))

    def with_dropped(self, steps: Iterable[int]) -> "Gaps":
        """Return these gaps plus steps that were dropped."""
        return replace(self, dropped=tuple(sorted({*self.dropped, *steps})))


def in_ranges(step: int, ranges: Ranges) -> bool:
    """Return whether the step is in one of the ascending ranges."""
    before = bisect_right(ranges, step, key=lambda ends: ends[0])
    return before > 0 and step <= ranges[before - 1][1]


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Merge adjacent ranges: (1, 2), (3, 3), (7, 7) become (1, 3), (7, 7)."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def parse_gaps(document: dict[str, Any]) -> Gaps:
    """Parse gaps.json, whose checksum has been checked and removed."""
    check_version(document, GAPS_FILE)
    members = {name: value for name, value in document.items() if name != "format_version"}
    members = fields_of(Gaps, members, GAPS_FILE)
    removed = tuple((first, last) for first, last in members["removed"])
    return Gaps(removed, tuple(members["dropped"]), tuple(members["lost"]))


def write_gaps(record: Path, gaps: Gaps) -> None:
    """Commit gaps.json."""
    commit_file(record / GAPS_FILE, checksummed_bytes({"format_version": FORMAT_VERSION} | vars(gaps)))
