"""Devices, cores, memory, disk and permissions of this machine, as the kernel reports them."""

import contextlib
import ctypes
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from areal_core.safety.secrets import masker, names_secret
from recorder.environment import cpu_model

GPU_TIMEOUT_S = 10.0  # nvidia-smi does not return while a driver hangs
GPU_FIELDS = "name,memory.total,driver_version"
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNLIMITED = 1 << 60  # bytes: a control group without a limit has a number above it
# beginnings of the variables that decide about threads, devices, numbers and places
VARIABLES = (
    *("AREAL_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "CUDA_", "CUBLAS", "NVIDIA_", "NCCL_", "NVTE_"),
    *("TORCH", "PYTORCH_", "SGLANG_", "VLLM_", "HF_", "TOKENIZERS_", "SLURM_JOB_ID", "RAY_ADDRESS"),
)


@dataclass(frozen=True)
class Disk:
    """A file system: what it is for, and its bytes."""

    place: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Machine:
    """What a run can use. A limit is None where there is none; `gpu_problem` is a sentence."""

    system: str
    cpu: str
    gpus: tuple[str, ...]
    gpu_problem: str | None
    num_cores: int
    usable_cores: int
    memory_bytes: int
    memory_limit_bytes: int | None
    disks: tuple[Disk, ...]
    variables: dict[str, str]


@dataclass(frozen=True)
class Permissions:
    """What the kernel allows. `refuses_stacks` is why py-spy cannot read other processes.

    `confinement` is what limits readers of untrusted files; `perf_level` is
    `kernel.perf_event_paranoid`.
    """

    refuses_stacks: str | None
    confinement: str
    perf_level: int | None


def read_machine() -> Machine:
    """Read the facts; none of them needs root or a library."""
    gpus, gpu_problem = read_gpus()
    places = {"current folder": ".", "/dev/shm": "/dev/shm"}
    usages = {name: shutil.disk_usage(place) for name, place in places.items() if os.path.isdir(place)}
    disks = [Disk(name, usage.total, usage.free) for name, usage in usages.items()]
    return Machine(
        system=platform.platform(),
        cpu=cpu_model(),
        gpus=gpus,
        gpu_problem=gpu_problem,
        num_cores=os.cpu_count() or 1,
        usable_cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_limit_bytes=memory_limit(),
        disks=tuple(disks),
        variables=variables_set(),
    )


def read_gpus() -> tuple[tuple[str, ...], str | None]:
    program = shutil.which("nvidia-smi")
    if program is None:
        driver = Path("/sys/module/nvidia/version")
        if driver.is_file():
            return (), f"driver {driver.read_text().strip()} of NVIDIA is loaded, and there is no nvidia-smi"
        return (), "a driver of AMD is loaded, which is not examined" if os.path.exists("/dev/kfd") else None
    command = [program, f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GPU_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return (), f"nvidia-smi did not return within {GPU_TIMEOUT_S:g} s: the driver may hang"
    if done.returncode != 0:
        return (), f"nvidia-smi fails with code {done.returncode}: {(done.stdout + done.stderr).strip()}"
    return tuple(", ".join(map(str.strip, line.split(","))) for line in done.stdout.splitlines()), None


def memory_limit() -> int | None:
    """Return the smallest memory limit of this process's control groups in bytes, or None."""
    with contextlib.suppress(OSError):
        limits = []
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            is_old = controllers == "memory"
            root = CGROUPS / "memory" if is_old else CGROUPS
            name = "memory.limit_in_bytes" if is_old else "memory.max"
            inside = root / path.lstrip("/")
            for folder in (inside, *inside.parents):
                file = folder / name
                if file.is_relative_to(root) and file.is_file():
                    limits.append(file.read_text().strip())
        numbers = [int(text) for text in limits if text.isdecimal() and int(text) < UNLIMITED]
        return min(numbers, default=None)
    return None


def variables_set() -> dict[str, str]:
    """Return the variables of `VARIABLES` that are set, without credentials."""
    hide = masker()
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    return {name: hide.text(value) for name, value in found.items() if not names_secret(name)}


def read_permissions() -> Permissions:
    """Try what the tools need in child processes of this one."""
    perf = Path("/proc/sys/kernel/perf_event_paranoid")
    return Permissions(
        refuses_stacks=why_no_stacks(),
        confinement=active_confinement(),
        perf_level=int(perf.read_text()) if perf.is_file() else None,
    )


def why_no_stacks() -> str | None:
    """Return why py-spy cannot read the stacks of another process of this user; None if it can."""
    from hangdoctor.collect.pyspy import cause_of_refusal, current_access

    if sys.platform != "linux":
        return f"stacks of other processes are read on Linux, and this is {platform.system()}"
    access = current_access(os.getuid())
    only_children = access.ptrace_scope == 1 and not access.may_ptrace
    return cause_of_refusal(access) if only_children or not reads_a_child() else None


def reads_a_child() -> bool:
    """Return whether the kernel lets this process read the memory of a child, as py-spy does."""
    read = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if read is None:
        return False
    source, target = (ctypes.create_string_buffer(8) for _ in range(2))
    here, there = ((ctypes.c_size_t * 2)(ctypes.addressof(one), 8) for one in (target, source))
    waits, ends = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ends)
        os.read(waits, 1)
        os._exit(0)
    try:
        return bool(read(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == 8)
    finally:
        os.close(ends)  # which ends the child
        os.waitpid(pid, 0)
        os.close(waits)


def active_confinement() -> str:
    from recorder.confine import Bounds, run_confined

    active: list[str] = []
    listed: list[str] = run_confined(lambda: active, Bounds("nothing", ()), announce=active.append)
    return ", ".join(name for name in listed[0].split(", ") if name.startswith("Landlock"))
