"""A checkpoint that a thread writes while training goes on, one at a time.

training thread                                     background thread
start(folder, write) ---------------------------->  write(given_up): files, fsync, commit
... trains ...
finished(): None while it is written; then where
wait(): before the next start, and as the run ends
close(): sets given_up, because something failed  >  stops to wait for other ranks, and ends

What `write` raises is raised in the training thread, by whichever of `finished` and `wait` is called next. `write` must make no
collective: it would get between those of training.
"""

import threading
from collections.abc import Callable
from pathlib import Path


class BackgroundSave:
    """The thread of the checkpoint that is being written, if one is."""

    def __init__(self) -> None:
        self._given_up = threading.Event()
        self._thread: threading.Thread | None = None
        self._folder = Path()
        self._error: BaseException | None = None

    def start(self, folder: Path, write: Callable[[threading.Event], None]) -> None:
        """Lets a thread run `write`, which makes `folder`. Call when the one before has been waited for."""
        assert self._thread is None, "the checkpoint before is still being written"

        def run() -> None:
            try:
                write(self._given_up)
            except BaseException as error:
                self._error = error

        self._folder = folder
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def finished(self) -> Path | None:
        """The checkpoint that has become whole since it was started, told once; raises what writing it raised."""
        return None if self._thread is None or self._thread.is_alive() else self.wait()

    def wait(self) -> Path | None:
        """Waits for the checkpoint that is being written, and returns as `finished` does."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._folder

    def close(self) -> None:
        """Gives up what is being written: it does not become whole unless it is almost."""
        self._given_up.set()
        if self._thread is not None:
            self._thread.join()
