"""Runs a training script on this machine: SGLang servers first, then torchrun on the devices that are left.

launcher (main thread)                       children, each in a session of its own
start servers, wait for /health              server 0..n-1      output -> llm_server_{i}.log
start ranks                                  torchrun -> ranks  output -> pipe -> trainer.log and our output
every 0.2 s: trainer ended?  server ended?
a server ended: others left -> go on; none left -> the ranks get 30 s to say so and end by themselves
any way out (end, error, SIGTERM, SIGINT): every child is ended
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from areal_core.allocation import Allocation
from areal_core.config import BaseExperimentConfig
from areal_core.launch.errors import ServerFailed
from areal_core.launch.sglang_server import SGLangServer, cpu_environment, server_args
from areal_core.launch.torchrun import POLL_S, ended_on_signals, run_ranks
from areal_core.rollout.servers import environment_of

# A group that spans trainer and server works only without these.
NCCL_WITH_SERVERS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


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

    from areal_core.environment import DETERMINISTIC

    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    env = {**(DETERMINISTIC if config.deterministic else {}), **env}
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
            addresses = ",".join(s.server.address for s in servers)
            print(f"for other processes: AREAL_LLM_SERVER_ADDRS={addresses}", flush=True)
            return watch_servers(servers)
        return run_ranks(script_argv, allocation.train.world_size, env, log_dir, partial(any_left, servers))


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
