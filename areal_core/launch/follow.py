"""Follow a log file that another machine writes: copy appended bytes to standard output."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from areal_core.launch.torchrun import POLL_S


@contextmanager
def following(log: Path) -> Iterator[None]:
    """Show a file as it is written, from its start, until the block ends; create it if missing."""
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    over = threading.Event()

    def follow(file: BinaryIO) -> None:
        last = False
        while not last:
            last = over.wait(POLL_S)  # a shared file system does not report changes
            try:
                sys.stdout.buffer.write(file.read())
                sys.stdout.buffer.flush()
            except BrokenPipeError:  # the reader of our output is gone; the run continues
                return

    with log.open("rb") as file:
        thread = threading.Thread(target=follow, args=(file,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
