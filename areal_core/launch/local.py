"""Run a job on this machine: servers on the first devices, torchrun on the others."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from areal_core.config import BaseExperimentConfig
from areal_core.launch.job import Job, run_job, spec_of
from areal_core.launch.placement import plan_servers, start_server
from areal_core.launch.server_process import InferenceServer
from areal_core.launch.torchrun import run_ranks


def launch(job: Job) -> int:
    """Run a job on this machine; return its exit code (see `run_job`)."""

    def run(env: Mapping[str, str], healthy: Callable[[], bool]) -> int:
        rollout = job.allocation.rollout
        separate = job.num_servers and job.allocation.kind != "colocated"
        if separate and rollout is not None and device_of(job.config) == "cuda":
            num_taken = rollout.world_size
            env = {**env, "CUDA_VISIBLE_DEVICES": ",".join(visible_devices()[num_taken:])}
        python = spec_of(job.config, "actor").command
        num_ranks = job.allocation.num_ranks
        return run_ranks(job.script_argv, num_ranks, env, job.log_dir, healthy, python=python)

    return run_job(job, lambda stack: start_servers(job, stack), run)


def start_servers(job: Job, stack: ExitStack) -> list[InferenceServer]:
    """Start every server, then wait for all; `stack` stops them. Raises `ServerFailed`."""
    servers = []
    for i, plan in enumerate(plan_servers(job, device_of(job.config), share_devices=True)):
        if plan.engine == "vllm" and device_of(job.config) == "cuda":
            # vLLM has no argument for its first device, so each server sees only its own.
            rollout = job.allocation.rollout
            assert rollout is not None
            size = rollout.world_size // rollout.data
            own = visible_devices()[i * size : (i + 1) * size]
            plan.env["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        servers.append(start_server(plan))
        stack.callback(servers[-1].stop)
    for server in servers:
        server.wait_until_ready()
    return servers


def device_of(config: BaseExperimentConfig) -> str:
    """ "cpu" or "cuda": the configured device, or that of this machine for "auto"."""
    if config.device != "auto":
        return config.device
    import torch  # here: a launcher that only runs ranks starts 3 s faster

    return "cuda" if torch.cuda.is_available() else "cpu"


def visible_devices() -> list[str]:
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
