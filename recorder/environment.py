"""Fingerprint of an environment: everything outside the config that can change a run's bits.

Environment variables are recorded from a fixed list, because others may contain credentials.
"""

import hashlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from crc32c import crc32c

from areal_core.safety.secrets import masker
from recorder.difference import Difference, find_differences

LIBRARIES = (
    "areal-debug",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "accelerate",
    "peft",
    "flash-attn",
    "triton",
    "sglang",
)
VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "MKL_CBWR",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "PYTHONHASHSEED",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "FLASH_ATTENTION_DETERMINISTIC",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NVLS_ENABLE",
    "NVIDIA_TF32_OVERRIDE",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
)
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".json", ".jinja", ".model", ".txt")


def environment(code: Path = Path(__file__).parent.parent) -> dict[str, Any]:
    """Return the fingerprint of this process, whose trainer is in a folder of `code`."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "num_cores": os.cpu_count(),
        "libraries": {name: library_version(name) for name in LIBRARIES},
        "torch": torch_facts(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "code": code_identity(code),
    }


def diff_environment(recorded: dict[str, Any], current: dict[str, Any]) -> tuple[Difference, ...]:
    """Differences between two fingerprints."""
    return find_differences(recorded, current)


def cpu_model() -> str:
    """The processor's name as reported by Linux, else the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def library_version(name: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def torch_facts() -> dict[str, Any]:
    """Build, threads, CPU kernels, determinism flags and GPUs of torch; no build without torch."""
    try:
        import torch
    except ImportError:
        return {"build": None}

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "build": str(torch.__version__),  # a str subclass, which JSON would not restore
        "git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "num_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        # these switches also apply on the CPU
        "attention_backends": {
            name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
            for name in ("flash", "mem_efficient", "math")
        },
        "gpus": gpus,
        "gpu_driver": gpu_driver() if gpus else None,
    }


def gpu_driver() -> str | None:
    """Version of the NVIDIA kernel driver, or None."""
    file = Path("/sys/module/nvidia/version")
    return file.read_text().strip() if file.is_file() else None


def git(folder: Path, *arguments: str) -> bytes | None:
    """Return the output of a git command, or None if git or the repository is absent."""
    try:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def code_identity(folder: Path) -> dict[str, str | None]:
    """Return the commit of the folder's repository, and sha256 of uncommitted changes or None.

    Both are None outside a repository, for example in an installed wheel.
    """
    commit = git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "dirty_sha256": None}
    changed = git(folder, "diff", "HEAD", "--binary") or b""
    new_files = (git(folder, "ls-files", "--others", "--exclude-standard", "-z", "*.py") or b"").split(b"\0")
    for name in sorted(filter(None, new_files)):
        changed += name + (folder / os.fsdecode(name)).read_bytes()
    return {
        "commit": commit.decode().strip(),
        "dirty_sha256": hashlib.sha256(changed).hexdigest() if changed else None,
    }


def file_identity(path: Path) -> dict[str, Any]:
    """Return size and crc32c of a file, read in blocks."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            crc = crc32c(block, crc)
    return {"size_bytes": path.stat().st_size, "crc32c": f"{crc:08x}"}


def folder_identity(path: str) -> dict[str, Any]:
    """Return the identity of a model or tokenizer folder: size and crc32c of each of its files.

    `files` is empty if the path is not a local folder. A credential in the path is masked.
    """
    folder = Path(path)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    kept = [file for file in files if file.is_file() and file.suffix in WEIGHT_SUFFIXES]
    return {"path": masker().text(path), "files": {file.name: file_identity(file) for file in kept}}
