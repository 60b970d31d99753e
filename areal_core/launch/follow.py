"""Shows a log file that another machine writes: copies what is appended to it to our standard output."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from areal_core.launch.torchrun import POLL_S


@contextmanager
def following(log: Path) -> Iterator[None]:
    """Shows what is written to a file, from its beginning, until the block ends. The file need not be there yet."""
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    over = threading.Event()

    def follow(file: BinaryIO) -> None:
        last = False
        while not last:
            last = over.wait(POLL_S)  # a shared file system has no way to tell of a change
            try:
                sys.stdout.buffer.write(file.read())
                sys.stdout.buffer.flush()
            except BrokenPipeError:  # whoever read us has left; the run goes on
                return

    with log.open("rb") as file:
        thread = threading.Thread(target=follow, args=(file,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
