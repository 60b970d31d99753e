"""The folder of a record's pictures, which all steps and ranks share.

    rank r   pictures that are not there ─ fsync ─> renamed to SHA256 ─> its files of the step
    rank 0   all of them are there ─> step.json ─> pictures of no step: SHA256.removed ─> gone

A rank does not write a picture that is there. Rank 0 may remove the last step that has it at the
same time: therefore it renames the file first, restores the name if a step that it commits needs
it, and removes the file when no rank can be at work on a step for which it saw it. A picture is on
the disk before the step that names it, and longer; what is left after a crash is named by no step,
and a resumed run removes it.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from areal_core.safety.durable import sync, write_durably
from recorder.errors import RecordError
from recorder.format import IMAGES_FOLDER
from recorder.pictures.named import PICTURE_NAME, Pictures

REMOVED, WRITING = ".removed", ".tmp"


def is_leftover(name: str) -> bool:
    """Return whether a file is of a writer at work, or of one that was killed."""
    return name.endswith((REMOVED, WRITING)) and PICTURE_NAME.match(name) is not None


def write_pictures(record: Path, rank: int, pictures: Pictures) -> None:
    """Write the pictures that the record does not have, durably; all are durable afterwards."""
    if not pictures:
        return
    folder = record / IMAGES_FOLDER
    if not folder.is_dir():
        folder.mkdir(exist_ok=True)
        sync(record)
    missing = [name for name, data in pictures.items() if not is_there(folder / name, data.nbytes)]
    for name in missing:
        temporary = folder / f"{name}.{rank:05d}{WRITING}"
        write_durably(temporary, pictures[name])
        temporary.rename(folder / name)
    sync(folder)  # also for those that another rank is about to sync


def is_there(path: Path, size_bytes: int) -> bool:
    try:
        return path.stat().st_size == size_bytes
    except FileNotFoundError:
        return False


class SharedPictures:
    """Rank 0's account of the pictures in a record's folder.

    Args:
        delay: steps that other ranks may be ahead of the one that is committed.
    """

    def __init__(self, record: Path, delay: int) -> None:
        self.folder, self.delay = record / IMAGES_FOLDER, delay
        self.uses: Counter[str] = Counter()  # steps that have it
        self.charged: dict[str, int] = {}  # the step to whose size its bytes are added
        self.removed: dict[str, int] = {}  # when they were renamed, counted in commits
        self.num_commits = 0

    def check(self, pictures: Iterable[str]) -> None:
        """Restore the pictures of a step that is about to be committed.

        Raises RecordError if one is not there.
        """
        restored = False
        for name in pictures:
            if self.removed.pop(name, None) is not None:  # the rank may have written it again
                (self.folder / f"{name}{REMOVED}").rename(self.folder / name)
                restored = True
            if not (self.folder / name).is_file():
                raise RecordError(f"{self.folder / name} is gone: somebody removed a picture of this step")
        if restored:
            sync(self.folder)

    def add(self, step: int, pictures: Mapping[str, int]) -> int:
        """Count a committed step; return the bytes of the pictures that no other step has."""
        self.num_commits += 1
        self.purge(self.delay)
        new = [name for name in pictures if name not in self.uses]
        self.uses.update(pictures.keys())
        self.charged.update(dict.fromkeys(new, step))
        return sum(pictures[name] for name in new)

    def drop(self, step: int, pictures: Mapping[str, int], heir: int) -> int:
        """Stop counting a removed step, and remove pictures that no other step has.

        Return the bytes of the step's pictures that stay: the step `heir` has them now.
        """
        inherited = 0
        for name, size_bytes in pictures.items():
            self.uses[name] -= 1
            if self.uses[name]:
                if self.charged[name] == step:
                    self.charged[name] = heir
                    inherited += size_bytes
                continue
            del self.uses[name], self.charged[name]
            (self.folder / name).rename(self.folder / f"{name}{REMOVED}")
            self.removed[name] = self.num_commits
        if not self.delay:
            self.purge(0)
        return inherited

    def purge(self, delay: int) -> None:
        for name, when in list(self.removed.items()):
            if self.num_commits - when >= delay:
                (self.folder / f"{name}{REMOVED}").unlink(missing_ok=True)
                del self.removed[name]

    def keep_only(self) -> None:
        """Remove what no counted step has: an interrupted run left it. No rank is writing."""
        if not self.folder.is_dir():
            return
        for name in os.listdir(self.folder):
            if name not in self.uses and (PICTURE_NAME.fullmatch(name) or is_leftover(name)):
                (self.folder / name).unlink()
