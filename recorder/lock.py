"""One writer a folder: refuse a second run, an import or an archive where a live process writes.

The lock of a record is in its folder; that of an archive is in the staging folder next to it, or of
a URL in the run's own. `areal_core.safety.lock` is the protocol.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_core.safety.lock import Held, Lock, live_holder, run_id, take
from recorder.errors import RecordInUse
from recorder.format import LOCK_FILE
from recorder.storage import STAGING_SUFFIX, is_url, location_of


def lock_folder(folder: Path, name: str, token: str = "") -> Lock:
    """Create the folder unless it exists, and take its lock (see `take`). Raises RecordInUse."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return take(folder / LOCK_FILE, run_id(), name, token)
    except Held as holder:
        raise in_use(folder, holder) from None


@contextmanager
def writing(folder: Path, name: str) -> Iterator[None]:
    """Hold the folder's lock inside the block. Raises RecordInUse."""
    lock = lock_folder(folder, name)
    try:
        yield
    finally:
        lock.release()


def check_not_in_use(folder: Path) -> None:
    """Raise RecordInUse if a live process writes into the folder."""
    if (holder := live_holder(folder / LOCK_FILE, run_id())) is not None:
        raise in_use(folder, holder)


def in_use(folder: Path, holder: object) -> RecordInUse:
    """Build the error for a folder that somebody else writes into."""
    return RecordInUse(
        f"{folder} is being written by {holder}: choose another folder, or wait until it has ended"
    )


def writer_of(path: str | os.PathLike[str]) -> str | None:
    """Return the live process that writes a record or a local archive, as a phrase, or None."""
    location = location_of(path)
    if is_url(location):
        return None
    folders = (Path(location), Path(location + STAGING_SUFFIX))
    return next(filter(None, (live_holder(folder / LOCK_FILE) for folder in folders)), None)
