"""Runs a training script on this machine: SGLang servers first, then torchrun on the devices that are left.

launcher (main thread)                       children, each in a session of its own
start servers, wait for /health              server 0..n-1      output -> llm_server_{i}.log
start ranks                                  torchrun -> ranks  output -> pipe -> trainer.log and our output
every 0.2 s: trainer ended?  server ended?
a server ended: others left -> go on; none left -> the ranks get 30 s to say so and end by themselves
any way out (end, error, SIGTERM, SIGINT): every child is ended
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from areal_core.allocation import Allocation
from areal_core.config import BaseExperimentConfig
from areal_core.launch.errors import ServerFailed
from areal_core.launch.processes import end_tree, start, thread_limits
from areal_core.launch.sglang_server import SGLangServer, cpu_environment, server_args
from areal_core.rollout.servers import environment_of

# A group that spans trainer and server works only without these.
NCCL_WITH_SERVERS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
GRACE_S = 30.0
POLL_S = 0.2


def launch(
    script_argv: Sequence[str],
    config: BaseExperimentConfig,
    allocation: Allocation,
    env: Mapping[str, str],
    *,
    log_dir: Path,
    with_servers: bool = True,
) -> int:
    """Runs a script on the ranks of `allocation`, and its servers beside them.

    Args:
        script_argv: script and its arguments, or `-m`, module and arguments.
        config: the run's options.
        allocation: who runs where.
        env: changes to the environment of the ranks.
        log_dir: folder for `trainer.log` and `llm_server_{i}.log`.
        with_servers: False for a replay, which needs none.

    Returns:
        The exit code of the first rank that failed, 0 when none did, 1 when the servers failed.
    """
    import torch  # here, because a launcher that only runs ranks starts three seconds sooner without it

    from areal_core.engine.determinism import ENVIRONMENT as DETERMINISM

    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    env = {**(DETERMINISM if config.deterministic else {}), **env}
    if not with_servers or allocation.rollout_backend != "sglang":
        return run_ranks(script_argv, allocation.train.world_size, env, log_dir)
    with ended_on_signals(), ExitStack() as stack:
        try:
            servers = start_servers(stack, config, allocation, device, log_dir)
        except ServerFailed as failure:
            print(failure, file=sys.stderr)
            return 1
        env = {**env, **NCCL_WITH_SERVERS, **environment_of([s.server for s in servers])}
        if device == "cuda":
            used = 0 if allocation.kind == "colocated" else allocation.rollout.world_size
            env["CUDA_VISIBLE_DEVICES"] = ",".join(visible_devices()[used:])
        print(f"inference servers: {', '.join(s.server.address for s in servers)}", flush=True)
        if allocation.train is None:
            return watch_servers(servers)
        return run_ranks(script_argv, allocation.train.world_size, env, log_dir, partial(any_left, servers))


def run_ranks(
    script_argv: Sequence[str],
    num_ranks: int,
    env: Mapping[str, str],
    log_dir: Path,
    healthy: Callable[[], bool] = lambda: True,
) -> int:
    """Runs a script (or `-m module`) under torchrun; its output goes to ours and to `log_dir/trainer.log`.

    `healthy` is asked now and then; the ranks are ended `GRACE_S` after it says no.

    Returns:
        The exit code of the first rank that failed, 0 when none did.
    """
    torchrun = [sys.executable, "-m", "areal_core.launch.ranks", "--standalone", "--local-addr", "127.0.0.1"]
    command = [*torchrun, "--nproc-per-node", str(num_ranks), *script_argv]
    log_dir.mkdir(parents=True, exist_ok=True)
    with ended_on_signals(), (log_dir / "trainer.log").open("wb") as log:
        ranks = start(command, {**thread_limits(1), **terminal_environment(), **env}, subprocess.PIPE)
        copying = threading.Thread(target=copy_output, args=(ranks.stdout, log), daemon=True)
        copying.start()
        try:
            return wait_for_ranks(ranks, healthy)
        finally:
            end_tree(ranks)
            copying.join()
            ranks.stdout.close()


def wait_for_ranks(ranks: subprocess.Popen[bytes], healthy: Callable[[], bool]) -> int:
    """The exit code of torchrun; 1 when it had to be ended because `healthy` said no."""
    deadline = None
    while True:
        try:
            return ranks.wait(POLL_S)
        except subprocess.TimeoutExpired:
            pass
        if deadline is None and not healthy():
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            return 1


def copy_output(source: BinaryIO, log: BinaryIO) -> None:
    """Copies bytes as they come, to the log and to our standard output."""
    while chunk := os.read(source.fileno(), 65536):
        log.write(chunk)
        log.flush()
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()


def terminal_environment() -> dict[str, str]:
    """Tells the ranks, which write to a pipe, of the terminal that we copy to."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return {}
    return {"FORCE_COLOR": "1", "COLUMNS": str(os.get_terminal_size(sys.stdout.fileno()).columns)}


def start_servers(
    stack: ExitStack, config: BaseExperimentConfig, allocation: Allocation, device: str, log_dir: Path
) -> list[SGLangServer]:
    """Starts every server, then waits for all; `stack` stops them. Raises `ServerFailed`."""
    model_path = config.sglang.model_path or config.actor.path
    ranks_per_server = allocation.rollout.world_size // allocation.rollout.data
    servers = []
    for i in range(allocation.rollout.data):
        options = replace(config.sglang, random_seed=config.sglang.random_seed + i)
        args = server_args(
            options, device, tensor_size=allocation.rollout.tensor, base_gpu_id=i * ranks_per_server
        )
        env = cpu_environment() if device == "cpu" else NCCL_WITH_SERVERS
        log = log_dir / f"llm_server_{i}.log"
        server = SGLangServer(model_path, log, args, env, ready_timeout_s=config.rollout.setup_timeout)
        stack.callback(server.stop)
        servers.append(server)
    for server in servers:
        server.wait_until_ready()
    return servers


def any_left(servers: list[SGLangServer]) -> bool:
    """Whether a server still runs. Tells of each that has ended, once, and forgets it."""
    for server in list(servers):
        try:
            server.check()
        except ServerFailed as failure:
            print(failure, file=sys.stderr, flush=True)
            servers.remove(server)
    return bool(servers)


def watch_servers(servers: list[SGLangServer]) -> int:
    """Serves until the last server has ended; 1 then."""
    while any_left(servers):
        time.sleep(POLL_S)
    return 1


def visible_devices() -> list[str]:
    """The GPUs that this process may use, as CUDA names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


@contextmanager
def ended_on_signals() -> Iterator[None]:
    """Turns SIGTERM into an exception (SIGINT is one already), so that `finally` ends the children."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
