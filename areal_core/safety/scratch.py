"""Write a folder next to its final place, and rename it when it is complete.

    DEST's parent/.DEST.unfinished/     0700, locked while a process writes into it
                     content/  ──rename──>  DEST
                     replaced/              what was at DEST, if that was to be replaced

A process that is killed leaves the unfinished folder, which the next one finds: it may continue
there, or clear it. After an error it is removed, so that it takes no space; after an interrupt only
if nothing can continue there.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from areal_core.safety.durable import exchanged, sync

CONTENT, REPLACED = "content", "replaced"


class FolderInUse(ValueError):
    """Another process writes into the unfinished folder."""


@contextmanager
def unfinished_folder(destination: Path, may_continue: bool = False) -> Iterator[Path]:
    """Yield `content`, an empty or unfinished path next to the destination; rename it at the end.

    `content` does not exist yet, unless `may_continue` is set and a killed process left it. What is
    at the destination is replaced: the caller has asked for that or checked it.

    Raises:
        FolderInUse: another process writes there.
        ValueError: the unfinished folder is of another user.
        OSError: of the file system; nothing is left behind.
    """
    destination = Path(os.path.abspath(destination))
    destination.parent.mkdir(parents=True, exist_ok=True)
    place = destination.with_name(f".{destination.name}.unfinished")
    handle = locked_folder(place)
    try:
        put_back(place / REPLACED, destination)  # of a process that was killed between two renames
        if not may_continue:
            clear(place)
        yield place / CONTENT
        if (place / CONTENT).exists():
            rename_over(place / CONTENT, destination, place / REPLACED)
        shutil.rmtree(place)  # with what was there, if it was exchanged
    except BaseException as error:
        goes_on = may_continue and isinstance(error, KeyboardInterrupt)
        if not goes_on and not (place / REPLACED).exists():  # else it could not be put back
            shutil.rmtree(place, ignore_errors=True)
        raise
    finally:
        os.close(handle)


def locked_folder(place: Path) -> int:
    """Create or open the folder, lock it, return its descriptor. Raises FolderInUse, ValueError."""
    while True:
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
        handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            facts = os.fstat(handle)
            if facts.st_uid != os.getuid():
                raise ValueError(f"{place} belongs to another user: choose another destination")
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if place.exists() and place.stat().st_ino == facts.st_ino:
                return handle
        except BlockingIOError:
            os.close(handle)
            what = f"another process is writing {place}: wait for it, or choose another destination"
            raise FolderInUse(what) from None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the process that held the lock has finished and removed the folder


def clear(folder: Path) -> None:
    """Remove everything in a folder."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def rename_over(content: Path, destination: Path, replaced: Path) -> None:
    """Rename the content to the destination, which a failure leaves as it was.

    What is there is exchanged in one call where the file system can, else it is moved aside first.
    """
    shutil.rmtree(replaced, ignore_errors=True)
    both_files = destination.is_file() and content.is_file()
    empty = destination.is_dir() and not any(destination.iterdir())
    in_one_call = not destination.exists() or both_files or (empty and content.is_dir())
    if in_one_call or not exchanged(content, destination):
        if not in_one_call:
            destination.rename(replaced)
        try:
            content.rename(destination)
        except OSError:
            put_back(replaced, destination)
            raise
    sync(destination.parent)


def put_back(replaced: Path, destination: Path) -> None:
    if replaced.exists() and not destination.exists():
        replaced.rename(destination)
