"""Fingerprint of an environment: everything outside the config that can change a run's bits.

Environment variables are recorded from a fixed list, because others may contain credentials. Of
those that the user's own code reads, only numbers and switches are recorded as they are.
"""

import os
import platform
import re
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from crc32c import crc32c

from areal_core.safety.secrets import masker, names_secret
from recorder.difference import Difference, find_differences
from recorder.environment.code import LIBRARIES, code_identity, main_script, source_of, user_files

# of which every record has those that were set
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
# of which a record has every one, null if it was not set; one made before they were listed has none
LATER_VARIABLES = (
    "ATTN_BACKEND",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUDA_LAUNCH_BLOCKING",
    "DNNL_MAX_CPU_ISA",
    "KMP_DETERMINISTIC_REDUCTION",
    "MKL_ENABLE_INSTRUCTIONS",
    "NCCL_ALLOC_P2P_NET_LL_BUFFERS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_P2P_DISABLE",
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
    "PYTHONOPTIMIZE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE",
    "SGLANG_USE_CPU_ENGINE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_COMPILE_DISABLE",
    "TORCH_LINALG_PREFER_CUSOLVER",
    "TORCHDYNAMO_DISABLE",
    "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING",
    "TORCHINDUCTOR_FREEZING",
    "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM",
    "TRANSFORMERS_ATTN_IMPLEMENTATION",
    "TRITON_F32_DEFAULT",
    "USE_FLASH_ATTENTION",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_BATCH_INVARIANT",
    "VLLM_FLASH_ATTN_VERSION",
    "VLLM_USE_FLASHINFER_SAMPLER",
    "VLLM_USE_V1",
)
# how code reads a variable: os.environ["NAME"], environ.get("NAME"), getenv("NAME")
READ = re.compile(r"""(?:environ(?:\.get\(|\.setdefault\(|\[)|getenv\()\s*["'](\w+)["']""")
PLAIN = re.compile(r"[-+]?\d[\d._]{0,15}(?:[eE][-+]?\d{1,3})?|(?i:true|false|yes|no|on|off)|")
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
        "variables": variables_set(),
        "code": code_identity(code),
    }


def variables_set() -> dict[str, str | None]:
    """Return the variables that are known to act on numbers, and those that the user's code reads.

    Of the latter, a value that is no number and no switch is a crc32c: it may be a credential.
    """
    hide = masker()
    script = main_script()
    texts = [source_of(path) for path in user_files(script)]
    read = {name for text in texts for name in READ.findall(text) if not names_secret(name)}
    found = {name: hide.text(os.environ[name]) for name in VARIABLES if name in os.environ}
    later = {name: os.environ.get(name) for name in LATER_VARIABLES}
    theirs = {name: shown(os.environ.get(name)) for name in sorted(read - {*VARIABLES, *LATER_VARIABLES})}
    return found | {name: value and hide.text(value) for name, value in later.items()} | theirs


def shown(value: str | None) -> str | None:
    """Return a number or switch as it is, any other value as its crc32c."""
    if value is None or PLAIN.fullmatch(value):
        return value
    return f"crc32c {crc32c(os.fsencode(value)):08x}"


def diff_environment(recorded: dict[str, Any], current: dict[str, Any]) -> tuple[Difference, ...]:
    """Differences between two fingerprints, in what is known of both.

    Code outside the repository is not compared: a replay runs another script, and
    `replayer.commits.outside` compares two runs.
    """
    sides = [dict(side) for side in (recorded, current)]
    for side in sides:
        side.pop("num_rows", None)  # of data, which a replay does not have
        if isinstance(code := side.get("code"), dict):
            side["code"] = {name: code[name] for name in ("commit", "dirty_sha256") if name in code}
    if all(isinstance(side.get("variables"), dict) for side in sides):
        known = sides[0]["variables"].keys() & sides[1]["variables"].keys() | set(VARIABLES)
        for side in sides:
            side["variables"] = {name: value for name, value in side["variables"].items() if name in known}
    if all(isinstance(side.get("libraries"), dict) for side in sides):
        both = sides[0]["libraries"].keys() & sides[1]["libraries"].keys()
        for side in sides:
            side["libraries"] = {name: side["libraries"][name] for name in both}
    return find_differences(*sides)


def cpu_model() -> str:
    """The processor's name as reported by Linux, else the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@cache
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
