"""The command line and environment of one vLLM server, on a GPU or on the CPU."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from areal_core.config import VLLMConfig
from areal_core.launch.processes import thread_limits
from areal_core.launch.server_process import flags, path_with
from areal_core.safety.interpreter import python_command

MODULE = "vllm.entrypoints.openai.api_server"
WORKER = Path(__file__).parent / "vllm_worker"
# What a run needs: log-probs of the distribution that is sampled from, ids in and out, and weights
# over a process group through our own class, which vLLM imports by its name.
FIXED = [
    "--logprobs-mode", "processed_logprobs",
    "--enable-scale-out",
    "--worker-extension-cls", "areal_vllm_worker.WorkerExtension",
    "--weight-transfer-config", '{"backend": "areal"}',
]  # fmt: skip
NOT_FLAGS = {"python", "model", "worker_extension_cls", "swap_space", "max_seq_len_to_capture"}
# On the CPU the environment limits the cache, and blocks of 16 tokens are too small.
NOT_ON_CPU = {"block_size", "gpu_memory_utilization", "cpu_offload_gb"}
CPU_CACHE_GIB = 1


def server_command(
    model: Path | str, args: list[str], python: str = "", command: Sequence[str] = ()
) -> list[str]:
    """Command of a server: `command`, or vLLM's by the interpreter `python` or else this one."""
    started = command or python_command("-m", MODULE, python=[python] if python else ())
    return [*started, "--model", str(model), *args]


def server_args(
    options: VLLMConfig, device: str, *, tensor_size: int = 1, pipeline_size: int = 1
) -> list[str]:
    """Command-line arguments of a server on `device`, "cuda" or "cpu"."""
    without = NOT_FLAGS | NOT_ON_CPU if device == "cpu" else NOT_FLAGS
    values = {
        field.name: getattr(options, field.name) for field in fields(options) if field.name not in without
    }
    if device == "cpu":
        return [*flags(values | {"enforce_eager": True}), *FIXED]
    sizes = {"tensor_parallel_size": tensor_size, "pipeline_parallel_size": pipeline_size}
    return [*flags(values | sizes), *FIXED]


def server_environment(device: str) -> dict[str, str]:
    """Environment of a server: the routes of weight updates, and our class on its path."""
    on_cpu = {**thread_limits(1), "VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE_GIB)}
    return {
        **(on_cpu if device == "cpu" else {}),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": path_with(WORKER),
    }
