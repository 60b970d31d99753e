"""Give up this process's rights to files, programs and TCP by Landlock; Linux only.

No package on PyPI for it is well kept, and it is three system calls, so they are called through
ctypes. It applies where the kernel has it. A process that gave up a right, and every thread and
process that it starts later, cannot get it back.

Files below `reads` can be read and files below `writes` changed, no other file opened, and no
program started; from ABI 4 no TCP without `network`, from ABI 6 no signal to another process.
"""

import ctypes
import os
import platform
import struct
from collections.abc import Iterable
from pathlib import Path

PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG = 38, 1
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEV = 1, 2, 4, 8, 1 << 14, 1 << 15
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # file rights of an ABI; 16 from 5 on
TCP, SCOPES = 3, 3  # bind and connect; abstract sockets and signals


def restrict(reads: Iterable[str | Path], writes: Iterable[str | Path], network: bool) -> str | None:
    """Give up everything else, for this thread and those it starts.

    Returns:
        The name with the ABI, None if the kernel has no Landlock.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if platform.system() != "Linux" or libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return None
    abi = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if abi < 1:
        return None
    handled = (1 << NUM_RIGHTS.get(abi, 16)) - 1
    attributes = struct.pack("QQQ", handled, 0 if network else TCP, SCOPES)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    rules = libc.syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0)
    if rules < 0:
        return None
    try:
        for path in reads:
            allow(libc, rules, path, (READ_FILE | READ_DIR) & handled)
        for path in writes:
            allow(libc, rules, path, handled & ~(EXECUTE | IOCTL_DEV))
        return f"Landlock ABI {abi}" if libc.syscall(LANDLOCK_RESTRICT, rules, 0) == 0 else None
    finally:
        os.close(rules)


def allow(libc: ctypes.CDLL, rules: int, path: str | Path, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not Path(path).is_dir():
        rights &= FILE_RIGHTS
    libc.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, place), 0)
    os.close(place)
