"""Write files that are complete or absent, and say in one sentence why one cannot be written.

    replacing(path)   PATH.tmp ─ bytes ─ fsync ─ rename to PATH ─ fsync of the folder
    commit_folder     FOLDER.partial, complete ─ exchanged with FOLDER ─ the old one is removed
    append_lines      a line is complete, or the next writer and every reader drop it

After an error `path` is what it was before, and the space of the temporary file is free again. No
link is followed: a folder that somebody sent may have a link at the name of a file of ours.
"""

import ctypes
import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

ADVICE = {
    errno.ENOSPC: "free space on that disk, or choose another place",
    errno.EDQUOT: "remove files of yours on that disk, or choose another place",
    errno.EROFS: "choose a place that can be written",
    errno.EIO: "the disk may be failing: look at its log, and choose another place",
    errno.EACCES: "choose a place that you may write",
    errno.EPERM: "choose a place that you may write",
    errno.ELOOP: "a link is not followed here: remove it, or choose another place",
    errno.EISDIR: "give the name of a file",
    errno.ENOTDIR: "choose a place below a folder",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOMEM: "raise `ulimit -v` if it is set, or free memory of this machine",
    errno.EAGAIN: "raise `ulimit -u`, or end other processes",
    errno.EFBIG: "raise `ulimit -f`",
}
# What Python, torch and the loader of libraries say in place of an errno.
SAID = {
    errno.ENOMEM: "failed to map segment from shared object$|annot allocate memory|can't allocate memory|bad_alloc",
    errno.EAGAIN: "can't start new thread",
    errno.ELOOP: "^Symlink loop from",
}
AT_FDCWD = -100
RENAME_EXCHANGE = 2
BLOCK_BYTES = 1 << 16
logger = logging.getLogger(__name__)


def sentence_of(error: OSError) -> str:
    """Return what could not be written or read, why, and what to do."""
    reason = error.strerror or str(error)
    place = "" if error.filename is None else f"{error.filename}: "
    advice = ADVICE.get(error.errno or 0)
    return f"{place}{reason}" + (f"; {advice}" if advice else "")


def os_error_of(error: BaseException) -> OSError | None:
    """Return the OSError behind an error: itself, or what its type or the text of a library says."""
    if isinstance(error, OSError):
        return error
    text = str(error).partition("\n")[0][:300]
    found = re.search(r"\(os error (\d+)\)", text)
    number = int(found[1]) if found else errno.ENOMEM if isinstance(error, MemoryError) else 0
    if not number and not isinstance(error, ValueError):  # whose text may be of what was read
        number = next((code for code, said in SAID.items() if re.search(said, text)), 0)
    return OSError(number, os.strerror(number) + f" ({text})" * (text != "")) if number else None


@contextmanager
def disk_errors_as_warnings(consequence: str) -> Iterator[None]:
    """Log an OSError as a warning, for files without which a run can go on."""
    try:
        yield
    except OSError as error:
        logger.warning("%s: %s", consequence, sentence_of(error))


def write_durably(path: Path, *parts: Any) -> None:
    """Write the buffers of bytes one after another, then fsync."""
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file, _named(path):
        for part in parts:
            write_all(file, part)
        os.fsync(file.fileno())


def _opened(path: Path, flags: int, buffering: int = 0) -> IO[bytes]:
    """Open a file for writing, by default without a buffer, if it is no link."""
    mode = "r+b" if flags & os.O_RDWR else "wb"
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    return open(path, mode, buffering, opener=lambda name, _: os.open(name, flags, 0o666))


def write_all(file: IO[bytes], data: Any) -> None:
    """Write a buffer to a file without a buffer of its own, which may take less at a time."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def sync(path: Path) -> None:
    """Fsync a file or a folder's entries; without it a rename may be lost on power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with _named(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def commit_file(path: Path, data: bytes | str) -> None:
    """Write a file, text in UTF-8, that has its name only when it is complete."""
    with replacing(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a binary file that gets the name `path` when the body has ended without an error.

    A device or a pipe is written as it is. An OSError names `path`, not the temporary file.
    """
    temporary = path.with_name(path.name + ".tmp")
    with _named(path, temporary):
        if path.exists() and not path.is_file() and not path.is_dir():
            with path.open("wb") as file:
                yield file
            return
        try:
            temporary.unlink(missing_ok=True)  # of a process that was killed, or another name of a file
            with _opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, -1) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        sync(path.parent)


@contextmanager
def _named(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Let an OSError of the body that names nothing, or `temporary`, name `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(temporary)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def commit_folder(partial: Path, folder: Path) -> None:
    """Give a complete folder its name; an older folder of that name is replaced, then removed.

    Where the file system can exchange two names, one of the two is there at any time. Elsewhere the
    older one is `FOLDER.old` in between, and comes back if the new one cannot get its name.
    """
    # deterministic: syncs every file
    for path in (*partial.rglob("*"), partial):
        sync(path)
    old = partial
    if not folder.exists():
        partial.rename(folder)
    elif not exchanged(partial, folder):
        old = folder.with_name(folder.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        try:
            partial.rename(folder)
        except OSError:
            old.rename(folder)
            raise
    sync(folder.parent)
    if old.exists():
        with disk_errors_as_warnings(f"what {folder} was before is not removed"):
            shutil.rmtree(old)


def remove_folder(folder: Path) -> None:
    """Remove a folder that never seems complete while some of its files are gone."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    shutil.rmtree(old)


def exchanged(one: Path, other: Path) -> bool:
    """Exchange two names; return whether this system and file system can."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    if (number := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def append_lines(path: Path, text: str) -> None:
    """Append complete lines to a log, in UTF-8; after an error it has none of them.

    An incomplete last line, of a writer that was killed, is removed first.
    """
    with _opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) as file, _named(path):
        size = _size_of_lines(file)
        file.truncate(size)
        try:
            write_all(file, text.encode())
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise


def remove_partial_line(path: Path) -> None:
    if path.exists():
        append_lines(path, "")


def _size_of_lines(file: IO[bytes]) -> int:
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - BLOCK_BYTES)
        file.seek(start)
        if (found := file.read(end - start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0
