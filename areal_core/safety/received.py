"""The one way to open a file that somebody may have sent, or that is found beside one.

Opening a FIFO waits for a writer, a device has no end, a sparse file fills the memory, and so does
a line without an end. A link is followed, as a user's own logs may be linked, to a regular file.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 1 << 40  # of what is read in pieces
MOST_AT_ONCE = 1 << 29
LONGEST_LINE = 1 << 26


class UnreadableFile(ValueError):
    """No regular file, or larger than what is read of its kind."""


def open_received(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> BinaryIO:
    """Open a regular file of at most `most_bytes` for reading. Raises UnreadableFile, OSError."""
    # O_NONBLOCK: opening a FIFO must not wait for a writer
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    facts = os.fstat(descriptor)
    if stat.S_ISREG(facts.st_mode) and facts.st_size <= most_bytes:
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(facts.st_mode):
        raise UnreadableFile(
            f"{path} has {facts.st_size:,} bytes, at most {most_bytes:,} are read of its kind"
        )
    raise UnreadableFile(f"{path} is no regular file: nothing else is read; remove it, or copy its content")


def read_received(path: str | os.PathLike[str], most_bytes: int = MOST_AT_ONCE) -> bytes:
    """Return the content of a file. Raises as `open_received` does."""
    with open_received(path, most_bytes) as file:
        return file.read(os.fstat(file.fileno()).st_size)  # a file that grows meanwhile has an end


def lines_received(path: Path, most_bytes: int = LONGEST_LINE, errors: str = "replace") -> Iterator[str]:
    """Yield the lines of a text, each with its end. Raises as `open_received`, and for a long line.

    Raises UnicodeDecodeError only with `errors` "strict".
    """
    with open_received(path) as file:
        number = 0
        while line := file.readline(most_bytes + 1):
            number += 1
            if len(line) > most_bytes:
                raise UnreadableFile(
                    f"{path}, line {number} has more than {most_bytes:,} bytes: it is no log"
                )
            yield line.decode("utf-8", errors)
