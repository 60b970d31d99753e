"""Starts one SGLang server, on a GPU or on the CPU, and waits until it answers.

On the CPU the name `sgl_kernel` must resolve to something that imports without a CUDA driver;
`sgl_kernel_cpu/` next to this file does, and is added to the path of the server process only.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from areal_core.config import SGLangConfig
from areal_core.config.servers import ALL_LINEAR
from areal_core.launch.processes import thread_limits
from areal_core.launch.server_process import InferenceServer, flags, path_with
from areal_core.safety.interpreter import python_command

MODULE = "sglang.launch_server"
SHIM = Path(__file__).parent / "sgl_kernel_cpu"
CPU_CACHE_TOKENS = 32768
NOT_FLAGS = {"model_path", "enable_multithread_load"}


class SGLangServer(InferenceServer):
    """A running SGLang server.

    Args:
        model_path: checkpoint folder.
        args: further command-line arguments (`server_args`).
        env: changes to the environment (`cpu_environment` on the CPU).
        log, host, port, ready_timeout_s: see `InferenceServer`.
        module: module to run instead of SGLang; it serves SGLang's routes.
    """

    def __init__(
        self,
        model_path: Path | str,
        log: Path,
        args: list[str],
        env: dict[str, str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        ready_timeout_s: float = 300.0,
        module: str = MODULE,
    ) -> None:
        command = server_command(model_path, args, module)
        super().__init__(command, log, env, host=host, port=port, ready_timeout_s=ready_timeout_s)


def server_command(
    model_path: Path | str, args: list[str], module: str = MODULE, command: Sequence[str] = ()
) -> list[str]:
    """Command of a server: `command`, or else the module."""
    return [*(command or python_command("-m", module)), "--model-path", str(model_path), *args]


def server_args(
    options: SGLangConfig, device: str, *, tensor_size: int = 1, base_gpu_id: int = 0
) -> list[str]:
    """Command-line arguments of a server on `device`, "cuda" or "cpu"."""
    if device == "cpu":
        # Without it an idle scheduler polls without a pause: two thirds of a core that the trainer
        # needs.
        return ["--device", "cpu", "--sleep-on-idle", *option_args(on_cpu(options))]
    return [*option_args(options), "--tp-size", str(tensor_size), "--base-gpu-id", str(base_gpu_id)]


def on_cpu(options: SGLangConfig) -> SGLangConfig:
    """Return the options for a CPU: torch-native kernels, little memory, a bounded cache."""
    return replace(
        options,
        attention_backend="torch_native",
        lora_backend="torch_native",
        mem_fraction_static=0.2,
        max_total_tokens=options.max_total_tokens or CPU_CACHE_TOKENS,
        disable_overlap_schedule=True,
        enable_metrics=False,
        enable_memory_saver=False,  # it needs CUDA: memory is "released" and kept
    )


def option_args(options: SGLangConfig) -> list[str]:
    values = {
        field.name: getattr(options, field.name) for field in fields(options) if field.name not in NOT_FLAGS
    }
    if ALL_LINEAR in (options.lora_target_modules or ()):
        values["lora_target_modules"] = ["all"]
    args = flags(values)
    if options.enable_multithread_load:
        args += ["--model-loader-extra-config", '{"enable_multithread_load": true}']
    return args


def cpu_environment(num_threads: int = 1) -> dict[str, str]:
    return {
        **thread_limits(num_threads),
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": path_with(SHIM),
    }
