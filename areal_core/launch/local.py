"""Runs a job on this machine: SGLang servers on the first devices, then torchrun on those that are left."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from areal_core.config import BaseExperimentConfig
from areal_core.launch.job import Job, run_job
from areal_core.launch.server_plan import plan_servers, start_server
from areal_core.launch.sglang_server import SGLangServer
from areal_core.launch.torchrun import run_ranks


def launch(job: Job) -> int:
    """Runs a job here; its exit code, as `run_job` gives it."""

    def run(env: Mapping[str, str], healthy: Callable[[], bool]) -> int:
        rollout, train = job.allocation.rollout, job.allocation.train
        assert train is not None  # `run_job` starts no ranks without one
        separate = job.num_servers and job.allocation.kind != "colocated"
        if separate and rollout is not None and device_of(job.config) == "cuda":
            num_taken = rollout.world_size
            env = {**env, "CUDA_VISIBLE_DEVICES": ",".join(visible_devices()[num_taken:])}
        return run_ranks(job.script_argv, train.world_size, env, job.log_dir, healthy)

    return run_job(job, lambda stack: start_servers(job, stack), run)


def start_servers(job: Job, stack: ExitStack) -> list[SGLangServer]:
    """Starts every server, then waits for all; `stack` stops them. Raises `ServerFailed`."""
    servers = []
    for plan in plan_servers(job, device_of(job.config), share_devices=True):
        servers.append(start_server(plan))
        stack.callback(servers[-1].stop)
    for server in servers:
        server.wait_until_ready()
    return servers


def device_of(config: BaseExperimentConfig) -> str:
    """ "cpu" or "cuda", as the config says or this machine has it."""
    if config.device != "auto":
        return config.device
    import torch  # here, because a launcher that only runs ranks starts three seconds sooner without it

    return "cuda" if torch.cuda.is_available() else "cpu"


def visible_devices() -> list[str]:
    """The GPUs that this process may use, as CUDA names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
