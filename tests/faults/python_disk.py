"""Count and fail the calls to the disk that Python code makes, where faulty_disk.c cannot be built.

Writes of native code, such as pyarrow's, are not seen.
"""

import builtins
import io
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disk import Control

TAKES_SPACE = ("mkdir", "fsync", "link", "symlink")
FREES_SPACE = ("unlink", "rmdir", "rename", "replace", "ftruncate")
CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
FULL = ("EROFS", "EIO")


class PythonDisk:
    """Replaces functions of `os`, and `open`, in this process and those that it forks."""

    def __init__(self, control: Control) -> None:
        self.control = control

    def install(self) -> None:
        """Replace the functions."""
        for name in (*TAKES_SPACE, *FREES_SPACE):
            setattr(os, name, self.counted(name, getattr(os, name)))
        opened, written = os.open, os.write

        def open_counted(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if flags & CHANGES:
                self.check("open", self.place(path, named.get("dir_fd")))
            return opened(path, flags, *rest, **named)

        def write_counted(descriptor: int, data: Any) -> int:
            self.check("write", self.place(descriptor), lambda: written(descriptor, half(data)))
            return written(descriptor, data)

        os.open, os.write = open_counted, write_counted
        builtins.open = io.open = self.open_file
        tempfile._io.open = self.open_file  # type: ignore[attr-defined]

    def counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a count of its calls; of two paths the last one counts."""

        def call(*args: Any, **named: Any) -> Any:
            which = 1 if name in ("rename", "replace", "link", "symlink") else 0
            folder = named.get("dir_fd", named.get("dst_dir_fd"))
            self.check(name, self.place(args[which], folder), takes_space=name in TAKES_SPACE)
            return real(*args, **named)

        return call

    def place(self, path: Any, folder: int | None = None) -> str:
        """Return the absolute path of a path or descriptor."""
        if isinstance(path, int):
            return os.readlink(f"/proc/self/fd/{path}") if os.path.isdir("/proc/self/fd") else ""
        base = "" if folder is None else os.readlink(f"/proc/self/fd/{folder}")
        return os.path.abspath(os.path.join(base, os.fsdecode(path)))

    def check(
        self, call: str, path: str, before: Callable[[], object] = lambda: None, takes_space: bool = True
    ) -> None:
        """Count a call, and fail if it is the chosen one."""
        control, root = self.control, self.control.root.decode()
        if not root or not (path == root or path.startswith(f"{root}/")):
            return
        control.calls += 1
        is_chosen = control.calls == control.at
        again = control.stays and control.fired and (takes_space or not frees(control.error))
        if not (is_chosen or again):
            return
        if is_chosen:
            control.what, control.fired = f"{call} {path}".encode()[:511], 1
            before()
        if control.error == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(control.error, os.strerror(control.error), path)

    def open_file(self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any) -> Any:
        """`open` with counted writes."""
        if isinstance(file, int) or not set(mode) & set("wax+"):
            return io_open(file, mode, buffering, *rest, **named)
        path = self.place(file)
        self.check("open", path)
        raw = CountedFile(file, mode.replace("b", "").replace("t", ""))
        raw.disk, raw.path = self, path
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest, **named)


class CountedFile(io.FileIO):
    """A file whose writes are counted."""

    disk: PythonDisk
    path: str

    def write(self, data: Any) -> int:
        write = super().write
        self.disk.check("write", self.path, lambda: write(half(data)))
        return write(data)


def half(data: Any) -> Any:
    """Return the first half of the bytes, which a disk that becomes full has taken."""
    view = memoryview(data).cast("B")
    return view[: len(view) // 2]


def frees(error: int) -> bool:
    """Return whether files can still be removed after this error: the disk is full, not broken."""
    import errno

    return errno.errorcode.get(error) not in FULL


io_open = io.open


def start(control_file: Path) -> Control:
    """Install the disk and return its control."""
    from disk import open_control

    control = open_control(control_file)
    PythonDisk(control).install()
    return control
