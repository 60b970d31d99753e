"""Check names that come from outside, and open files below a folder without following links.

A name from a record, a layout, a manifest, a tar archive or a URL is relative, with slashes. It can
name nothing outside the folder that it is used in, and it can be printed.
"""

import os
import re
import stat
from pathlib import Path

from areal_core.safety.printable import UNPRINTABLE, printable

MAX_PART_BYTES = 255  # of one part; what common file systems hold
MAX_NAME_BYTES = 1024
MAX_DEPTH = 16


class UnsafeName(ValueError):
    """A name from outside could mean another file than one below its folder."""


def checked_name(name: object, source: str) -> str:
    """Return the name, which is safe below any folder; `source` is where it was read.

    Raises:
        UnsafeName: not text, empty, absolute, with an empty part, `.` or `..`, a backslash, a NUL
            or control character, or too long or deep.
    """
    if reason := problem_of(name):
        raise UnsafeName(f"{source} has the file name {printable(repr(name), 120)}, which {reason}")
    assert isinstance(name, str)
    return name


def one_part(text: str) -> str:
    """Return a text as one part of a path, with what could mean another folder as `_`."""
    return re.sub(r"[^\w.+=@ -]|^\.+", "_", text)[: MAX_PART_BYTES // 4] or "_"


def problem_of(name: object) -> str | None:
    """Return why a name is not safe below a folder, or None."""
    if not isinstance(name, str):
        return "is not text"
    if UNPRINTABLE.search(name) or "\n" in name or "\t" in name:
        return "has a control character"
    parts = name.split("/")
    if name.startswith("/") or "\\" in name:
        return "is not relative, with slashes"
    if any(part in ("", ".", "..") for part in parts):
        return "has an empty or dot part"
    if len(parts) > MAX_DEPTH:
        return f"is {len(parts)} folders deep, at most {MAX_DEPTH} are allowed"
    sizes = [len(part.encode()) for part in parts]
    if max(sizes) > MAX_PART_BYTES or sum(sizes) > MAX_NAME_BYTES:
        return f"is longer than {MAX_PART_BYTES} bytes a part or {MAX_NAME_BYTES} in all"
    return None


def open_below(folder: str | os.PathLike[str], name: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a regular file below a folder, following no link on the way, and return its descriptor.

    A new file gets `mode` less the umask. The caller closes the descriptor.

    Raises:
        UnsafeName: the name is not safe, or what it names is a link, a folder, a device or a FIFO.
        OSError: it cannot be opened, FileNotFoundError if it is absent.
    """
    *folders, last = checked_name(name, str(folder)).split("/")
    parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in folders:
            below = _open_part(part, os.O_RDONLY | os.O_DIRECTORY, 0, parent, name)
            os.close(parent)
            parent = below
        # O_NONBLOCK: opening a FIFO must not wait for a writer
        descriptor = _open_part(last, flags | os.O_NONBLOCK, mode, parent, name)
    finally:
        os.close(parent)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnsafeName(f"{Path(folder) / name} is no regular file: nothing else is read or written")
    return descriptor


def _open_part(part: str, flags: int, mode: int, parent: int, name: str) -> int:
    try:
        return os.open(part, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=parent)
    except OSError as error:
        if os.path.islink(f"/proc/self/fd/{parent}/{part}"):
            raise UnsafeName(f"{name} goes through the link {part}: links are not followed") from error
        raise
