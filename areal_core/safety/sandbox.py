"""Give up this process's rights: Landlock for files, seccomp for system calls; Linux only.

No package on PyPI for either is well kept, and both are a few system calls, so they are called
through ctypes. Each applies "where the kernel has it": `restrict` returns what is active. A process
that gave up a right, and every thread it starts later, cannot get it back.

    Landlock  files below `reads` can be read, files below `writes` changed, no other file opened;
              from ABI 4 no TCP without `network`, from ABI 6 no signal to another process
    seccomp   no new process or program, no tracing, no signal to others, no change of rights,
              owner or times by name, no keys, mounts or modules, nothing typed into the terminal;
              without `network` no socket
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable
from pathlib import Path

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG = 22, 38, 1
SECCOMP_MODE_FILTER = 2
KILL_PROCESS, ERRNO, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF instructions
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data
X32 = 0x40000000  # system calls of the x32 ABI have this bit
CLONE_THREAD, TIOCSTI, TIOCLINUX = 0x10000, 0x5412, 0x541C

# name -> number on x86_64 and aarch64, None where there is no such call
DENIED = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "kill": (62, 129), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "chmod": (90, None), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "mknod": (133, None), "mknodat": (259, 33),
    "io_uring_setup": (425, 425), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "unshare": (272, 97), "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsmount": (432, 432), "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    "quotactl": (179, 60), "setrlimit": (160, 164), "iopl": (172, None), "ioperm": (173, None),
}  # fmt: skip
NETWORK = {"socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201)}
CLONE, CLONE3, IOCTL, TGKILL, PRLIMIT64 = (56, 220), (435, 435), (16, 29), (234, 131), (302, 261)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of a table, audit number

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEV = 1, 2, 4, 8, 1 << 14, 1 << 15
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # file rights of an ABI; 16 from 5 on
TCP, SCOPES = 3, 3  # bind and connect; abstract sockets and signals


def restrict(reads: Iterable[str | Path], writes: Iterable[str | Path], network: bool) -> list[str]:
    """Give up everything else, for this thread and those it starts; return what is active."""
    libc = ctypes.CDLL(None, use_errno=True)
    if platform.system() != "Linux" or libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return []
    return [name for name in (landlock(libc, reads, writes, network), seccomp(libc, network)) if name]


def landlock(
    libc: ctypes.CDLL, reads: Iterable[str | Path], writes: Iterable[str | Path], network: bool
) -> str | None:
    """Restrict files; return the name with the ABI, None if the kernel has no Landlock."""
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
            allow(libc, rules, path, (READ_FILE | READ_DIR | EXECUTE) & handled)
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


def seccomp(libc: ctypes.CDLL, network: bool) -> str | None:
    """Restrict system calls; return the name, None if the kernel or machine has none."""
    if platform.machine() not in MACHINES:
        return None
    column, architecture = MACHINES[platform.machine()]
    code = ctypes.create_string_buffer(b"".join(filter_code(column, architecture, network, os.getpid())))
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(code))
    done = libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)
    return "seccomp" if done == 0 else None


def filter_code(column: int, architecture: int, network: bool, pid: int) -> list[bytes]:
    """Assemble the BPF program; a denied call fails with EPERM, a foreign ABI ends the process."""
    denied, no_such_call = [step(RETURN, ERRNO | errno.EPERM)], [step(RETURN, ERRNO | errno.ENOSYS)]

    def if_call(number: int, body: list[bytes]) -> list[bytes]:
        return [step(EQUAL, number, 0, len(body)), *body]

    def if_argument(call: tuple[int, int], place: int, tests: list[bytes]) -> list[bytes]:
        body = [step(LOAD, ARGUMENTS_AT + 8 * place), *tests, step(LOAD, NUMBER_AT)]
        return if_call(call[column], body)

    code = [step(LOAD, ARCHITECTURE_AT), step(EQUAL, architecture, 1, 0), step(RETURN, KILL_PROCESS)]
    code += [step(LOAD, NUMBER_AT)]
    if column == 0:
        code += [step(AT_LEAST, X32, 0, 1), step(RETURN, KILL_PROCESS)]
    for numbers in (DENIED | ({} if network else NETWORK)).values():
        if (number := numbers[column]) is not None:
            code += if_call(number, denied)
    code += if_call(CLONE3[column], no_such_call)  # its flags are in memory; libc falls back to clone
    code += if_argument(CLONE, 0, [step(ANY_BIT, CLONE_THREAD, 1, 0), *denied])
    code += if_argument(TGKILL, 0, [step(EQUAL, pid, 1, 0), *denied])
    code += if_argument(PRLIMIT64, 2, [step(EQUAL, 0, 1, 0), *denied])  # reads limits, sets none
    inputs = [line for request in (TIOCSTI, TIOCLINUX) for line in (step(EQUAL, request, 0, 1), *denied)]
    code += if_argument(IOCTL, 1, inputs)
    return [*code, step(RETURN, ALLOW)]


def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One BPF instruction; the jumps count the instructions to skip."""
    return struct.pack("HBBI", code, if_true, if_false, value)
