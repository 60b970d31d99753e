"""Merge a native pass, which shows the C calls under the innermost Python frame: which lock, wait
or sleep.

py-spy's JSON comes first because it cannot disturb the job; its native text comes second where it
works. The two are joined thread by thread, and only where both show the same Python frames: a
thread that moved in between keeps its first stack.
"""

from hangdoctor.model import Thread


def merge_native(threads: tuple[Thread, ...], natives: tuple[Thread, ...]) -> tuple[Thread, ...]:
    """Return `threads` with native frames where the native pass saw the same Python stack."""
    if not natives or not threads:
        return threads or natives
    seen = {(thread.name, python_frames(thread)): thread.frames for thread in natives}
    return tuple(
        Thread(seen[key], t.name, t.active, t.holds_gil, t.waits_for_gil)
        if (key := (t.name, python_frames(t))) in seen
        else t
        for t in threads
    )


def python_frames(thread: Thread) -> tuple[tuple[str, int], ...]:
    """Return function and line of the Python frames: the two passes print paths of different
    length.
    """
    return tuple((frame.function, frame.line) for frame in thread.frames if not frame.native)
