"""A disk whose n-th change fails, seen from Python: the memory that processes share with the fault.

`faulty_disk.c` sees the calls of every library.
"""

import ctypes
import errno
import mmap
import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("faulty_disk.c")
CONTROL = "DISK_CONTROL"  # names the file of `Control` in the environment
KILL = 0


class Control(ctypes.Structure):
    _fields_ = [
        ("root", ctypes.c_char * 1024),
        ("at", ctypes.c_long),
        ("error", ctypes.c_int),
        ("stays", ctypes.c_int),
        ("calls", ctypes.c_long),
        ("fired", ctypes.c_int),
        ("what", ctypes.c_char * 512),
    ]

    def arm(self, root: Path, at: int, error: int = KILL, stays: bool = False) -> None:
        """Let the `at`-th change below `root` fail; 0 only counts."""
        self.calls = self.fired = 0
        self.at, self.error, self.stays, self.what = at, error, stays, b""
        self.root = str(root).encode()

    def disarm(self) -> None:
        """Let all calls pass, uncounted."""
        self.root = b""


def open_control(file: Path) -> Control:
    """Map the file, which is created, into memory that forked processes share."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, ctypes.sizeof(Control))
    memory = mmap.mmap(descriptor, ctypes.sizeof(Control))
    os.close(descriptor)
    return Control.from_buffer(memory)


def build(folder: Path) -> Path:
    """Compile the library into `folder`."""
    library = folder / "faulty_disk.so"
    subprocess.run(["cc", "-O1", "-fPIC", "-shared", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def name_of(error: int) -> str:
    return errno.errorcode[error] if error else "SIGKILL"
