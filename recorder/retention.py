"""Choose which steps of a growing record to remove, to keep it within limits set beforehand.

    pinned                     never removed
    the last `keep_last`       removed only for disk space: byte cap, free-disk floor; the very last one never
    divisible by `keep_every`  the same
    all others                 removed when `keep_last` newer steps exist

The oldest steps are removed first. Anchors are not counted and not removed: one of them is worth
thousands of steps.
"""

import errno
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from recorder.format import STEPS_FOLDER, step_name
from recorder.header import Gaps, write_gaps
from recorder.pictures.shared import SharedPictures
from recorder.reader import RecordedStep, read_manifest
from recorder.storage import FolderStorage

NO_PICTURES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class Retention:
    """Limits of a record. None, and 0 for the floor, are no limit.

    `keep_last` counts recorded steps; `max_bytes` limits the size of all steps; `min_free_bytes` is
    what the disk must have left.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    pinned: frozenset[int] = frozenset()
    max_bytes: int | None = None
    min_free_bytes: int = 0


def steps_to_remove(sizes: Mapping[int, int], free_bytes: int, limits: Retention) -> list[int]:
    """Return the steps to remove, ascending.

    Args:
        sizes: bytes of each committed step.
        free_bytes: free space of the disk.
    """
    steps = sorted(sizes)
    removable = [step for step in steps[:-1] if step not in limits.pinned]
    last = set(steps if limits.keep_last is None else steps[-limits.keep_last :])
    by_number = limits.keep_every
    outdated = {s for s in removable if s not in last and (by_number is None or s % by_number)}
    remaining = sum(sizes.values()) - sum(sizes[step] for step in outdated)
    free = free_bytes + sum(sizes[step] for step in outdated)
    for step in removable:
        over_cap = limits.max_bytes is not None and remaining > limits.max_bytes
        if not over_cap and free >= limits.min_free_bytes:
            break
        if step not in outdated:
            outdated.add(step)
            remaining, free = remaining - sizes[step], free + sizes[step]
    return sorted(outdated)


class KeptSteps:
    """Rank 0's account of its record: sizes of the steps, removed and dropped steps.

    The bytes of a picture belong to one of the steps that have it. `ahead` is how many steps
    another rank may be ahead of the one that is committed.
    """

    def __init__(self, record: Path, limits: Retention, ahead: int = 0) -> None:
        self.record, self.limits = record, limits
        self.sizes: dict[int, int] = {}
        self.gaps = Gaps()
        self.pictures = SharedPictures(record, ahead)

    def resume(self, sizes: dict[int, int], gaps: Gaps) -> None:
        """Start from the state that an earlier run left, without pictures of other steps."""
        self.sizes, self.gaps = sizes, gaps
        if self.pictures.folder.is_dir():
            for step in sizes:
                self.sizes[step] += self.pictures.add(step, self.named_pictures(step))
            self.pictures.keep_only()

    def add(self, step: int, size_bytes: int, pictures: Mapping[str, int] = NO_PICTURES) -> None:
        """Count a committed step with the sizes of its pictures; remove steps beyond the limits."""
        self.sizes[step] = size_bytes + self.pictures.add(step, pictures)
        self.make_room()

    def named_pictures(self, step: int) -> dict[str, int]:
        storage = FolderStorage(self.record)
        return RecordedStep(storage, read_manifest(storage, step)).named_pictures()

    def make_room(self) -> None:
        """Remove steps beyond the limits; gaps.json is updated first."""
        steps = steps_to_remove(self.sizes, shutil.disk_usage(self.record).free, self.limits)
        if not steps:
            return
        self.gaps = self.gaps.with_removed(steps)
        write_gaps(self.record, self.gaps)
        for step in steps:
            pictures = self.named_pictures(step) if self.pictures.uses else NO_PICTURES
            shutil.rmtree(self.record / STEPS_FOLDER / step_name(step))
            del self.sizes[step]
            heir = max(self.sizes)  # the last step is never removed
            self.sizes[heir] += self.pictures.drop(step, pictures, heir)

    def check_room(self) -> None:
        """Remove what the limits allow; raise OSError (ENOSPC) if the disk is still too full."""
        if not self.limits.min_free_bytes:
            return
        self.make_room()
        free = shutil.disk_usage(self.record).free
        if free < self.limits.min_free_bytes:
            raise OSError(
                errno.ENOSPC,
                f"the disk has {free:,} bytes left, and {self.limits.min_free_bytes:,} must stay free",
            )

    def add_dropped(self, steps: Sequence[int]) -> None:
        if not set(steps) <= set(self.gaps.dropped):
            self.gaps = self.gaps.with_dropped(steps)
            write_gaps(self.record, self.gaps)
