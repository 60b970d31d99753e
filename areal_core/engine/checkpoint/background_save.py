"""A checkpoint that a thread writes while training continues, one at a time.

training thread                                     background thread
start(folder, write) ---------------------------->  write(cancelled): files, fsync, commit
... trains ...
finished(): None while it is written; then where
wait(): before the next start, and as the run ends
close(): sets cancelled, because something failed ->  stops waiting for other ranks, and ends

An exception in `write` is raised in the training thread, by the next call of `finished` or `wait`.
`write` must not make a collective: it would interleave with those of training.
"""

import threading
from collections.abc import Callable
from pathlib import Path


class BackgroundSave:
    """The thread that writes a checkpoint, if one is being written."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        self._folder = Path()
        self._error: BaseException | None = None

    def start(self, folder: Path, write: Callable[[threading.Event], None]) -> None:
        """Run `write`, which creates `folder`, in a thread, after the previous one is done."""
        assert self._thread is None, "the previous checkpoint is still being written"

        def run() -> None:
            try:
                write(self._cancelled)
            except BaseException as error:
                self._error = error

        self._folder = folder
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def finished(self) -> Path | None:
        """Return the checkpoint if it is complete, once; re-raise its thread's exception."""
        return None if self._thread is None or self._thread.is_alive() else self.wait()

    def wait(self) -> Path | None:
        """Wait for the checkpoint that is being written; return, or raise, as `finished` does."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._folder

    def close(self) -> None:
        """Cancel the checkpoint that is being written, and join its thread.

        It is completed only if the files of all ranks are there already.
        """
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join()
