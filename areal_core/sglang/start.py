"""Starts one SGLang server, on a GPU or on the CPU, and waits until it answers.

On the CPU the name `sgl_kernel` must resolve to something that imports without a CUDA driver;
`sgl_kernel_cpu/` next to this file does, and is added to the path of the server process only.
"""

import os
import socket
import sys
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from random import SystemRandom
from types import TracebackType
from typing import Self

from areal_core.config import SGLangConfig
from areal_core.config.checks import ALL_LINEAR
from areal_core.errors import ServerFailed
from areal_core.launch.processes import end_tree, start, thread_limits
from areal_core.rollout.errors import ServerDied
from areal_core.rollout.fleet.server import Server, wait_until_healthy

SHIM = Path(__file__).parent / "sgl_kernel_cpu"
CPU_CACHE_TOKENS = 32768
LISTENING_PORTS = range(20_000, 32_768)  # Linux assigns outgoing connections those from 32,768
NOT_FLAGS = {"model_path", "enable_multithread_load"}


class SGLangServer:
    """A running server; a context manager that stops it. `server` is what a client needs.

    Args:
        model_path: checkpoint folder.
        log: file for everything the server prints.
        args: further command-line arguments (`server_args`).
        env: changes to the environment (`cpu_environment` on the CPU).
        host, port: where to listen; port 0 for any free one.
        ready_timeout_s: maximum seconds until `/health` answers.
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
        module: str = "sglang.launch_server",
    ) -> None:
        self.server = Server(f"{host}:{port or free_port(host)}", log)
        self._ready_timeout_s = ready_timeout_s
        _, _, listen = self.server.address.rpartition(":")
        command = [sys.executable, "-m", module, "--model-path", str(model_path)]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self.process = start([*command, "--host", host, "--port", listen, *args], env, output)

    def wait_until_ready(self) -> Self:
        """Wait until `/health` answers.

        Raises `ServerFailed`, with the last log lines, and stops the server.
        """
        try:
            wait_until_healthy([self.server], self._ready_timeout_s, self.check)
        except (ServerDied, ServerFailed) as failure:
            self.stop()
            raise ServerFailed(str(failure)) from failure
        return self

    def check(self) -> None:
        """Raise `ServerFailed` when the process has ended."""
        code = self.process.poll()
        if code is not None:
            raise ServerFailed(f"ended with exit code {code}: server {self.server.describe()}")

    def stop(self) -> None:
        """End the server and all its workers."""
        end_tree(self.process)

    def __enter__(self) -> Self:
        return self.wait_until_ready()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


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
    )


def option_args(options: SGLangConfig) -> list[str]:
    """Return one flag per field: True as a bare flag; None, False and empty values are left out."""
    args: list[str] = []
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in NOT_FLAGS or value is None or value is False or value == "" or value == []:
            continue
        if field.name == "lora_target_modules" and ALL_LINEAR in value:
            value = ["all"]
        args.append("--" + field.name.replace("_", "-"))
        if value is not True:
            args += [str(v) for v in value] if isinstance(value, list) else [str(value)]
    if options.enable_multithread_load:
        args += ["--model-loader-extra-config", '{"enable_multithread_load": true}']
    return args


def cpu_environment(num_threads: int = 1) -> dict[str, str]:
    """Environment of a server on the CPU."""
    path = [str(SHIM), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **thread_limits(num_threads),
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": os.pathsep.join(entry for entry in path if entry),
    }


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free at this moment, if possible none for outgoing connections.

    The server binds it seconds later: a connection of any process may take one of those until then.
    """
    with socket.socket() as listener:
        for port in SystemRandom().sample(LISTENING_PORTS, 100):
            with suppress(OSError):
                listener.bind((host, port))
                return port
        listener.bind((host, 0))
        return listener.getsockname()[1]
