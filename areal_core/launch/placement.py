"""The machines that a job needs, their ranks and servers, and the start arguments of each server.

A `ServerPlan` is plain data, so that another machine can start the server.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from areal_core.config import PPOConfig
from areal_core.config.allocation import Parallel
from areal_core.config.servers import ALL_LINEAR, server_options
from areal_core.errors import ConfigError
from areal_core.launch import sglang_process as sglang
from areal_core.launch import vllm_process as vllm
from areal_core.launch.job import NCCL_WITH_SERVERS, Job, parse_environment, spec_of
from areal_core.launch.server_process import InferenceServer


@dataclass(frozen=True)
class Placement:
    """Machines numbered from 0: those of the trainer first, then those that only serve.

    `server_nodes` is the machine of each server; servers share machines with ranks if devices are
    left. `devices_per_rank` is 0 for an evaluation on servers, whose process needs none.
    """

    num_trainer_nodes: int
    ranks_per_node: int
    server_nodes: tuple[int, ...]
    devices_per_server: int
    devices_per_rank: int = 1

    @property
    def num_nodes(self) -> int:
        """Total number of machines."""
        return max(self.num_trainer_nodes, *(node + 1 for node in self.server_nodes), 0)


def place(job: Job) -> Placement:
    """Assign machines of `cluster.n_gpus_per_node` devices, the trainer's first.

    Raises:
        ConfigError: the job does not fit into `cluster.n_nodes` such machines, or its ranks do not
            fill them.
    """
    per_node, limit = job.config.cluster.n_gpus_per_node, job.config.cluster.n_nodes
    world = job.allocation.num_ranks
    devices_per_rank = 0 if job.allocation.kind == "eval" and job.allocation.has_servers else 1
    num_trainer_nodes = -(-world // per_node)
    if num_trainer_nodes > 1 and world % per_node:
        raise ConfigError(
            f"the allocation trains on {world} ranks and cluster.n_gpus_per_node is {per_node}; "
            "on several machines the first must be a multiple of the second"
        )
    rollout = job.allocation.rollout
    size = rollout.world_size // rollout.data if job.num_servers and rollout is not None else 1
    if size > per_node:
        raise ConfigError(
            f"a server of the allocation has {size} devices and cluster.n_gpus_per_node is {per_node}; "
            "a server must fit into one machine"
        )
    free = [per_node] * limit
    for node in range(min(num_trainer_nodes, limit)):
        free[node] = max(per_node - world * devices_per_rank, 0)
    slots = [node for node, devices in enumerate(free) for _ in range(devices // size)]
    if num_trainer_nodes > limit or len(slots) < job.num_servers:
        raise ConfigError(
            f"the allocation {job.allocation} needs more than cluster.n_nodes = {limit} machines with "
            f"cluster.n_gpus_per_node = {per_node} devices: raise them, or use fewer ranks or servers"
        )
    ranks_per_node = world // num_trainer_nodes if num_trainer_nodes else 0
    servers = tuple(slots[: job.num_servers])
    return Placement(num_trainer_nodes, ranks_per_node, servers, size, devices_per_rank)


@dataclass(frozen=True)
class ServerPlan:
    """One server, in JSON types.

    `python` is the interpreter of a vLLM server; `command`, if not empty, starts a server in place
    of the engine's own command.
    """

    model_path: str
    log: str
    args: list[str]
    env: dict[str, str]
    ready_timeout_s: float
    engine: str = "sglang"
    python: str = ""
    command: Sequence[str] = ()


def plan_servers(job: Job, device: str, *, share_devices: bool) -> list[ServerPlan]:
    """Return one plan per server, each with its own seed; none if the job needs no servers.

    Args:
        device: "cuda" or "cpu".
        share_devices: True where every server sees the GPUs of all, False where each sees only its
            own.

    Raises:
        ConfigError: the config of the method has no rollout section.
    """
    config, rollout = job.config, job.allocation.rollout
    named = parse_environment("launcher.inference_server_env_vars", config.launcher.inference_server_env_vars)
    if not job.num_servers or rollout is None:
        return []
    if not isinstance(config, PPOConfig):
        raise ConfigError(
            f"the allocation {job.allocation} has inference servers and {type(config).__name__} has no rollout "
            "section: use an allocation that only trains, such as 'fsdp:d1'"
        )
    spec = spec_of(config, "rollout")
    with_others = NCCL_WITH_SERVERS if device == "cuda" else {}
    plans = []
    for i in range(job.num_servers):
        first_device = i * (rollout.world_size // rollout.data) if share_devices else 0
        if job.allocation.rollout_backend == "vllm":
            args, env = vllm_arguments(config, rollout, device, i)
        else:
            args, env = sglang_arguments(config, rollout, device, i, first_device)
        plans.append(
            ServerPlan(
                server_options(config, job.allocation).model,
                str(job.log_dir / f"llm_server_{i}.log"),
                args,
                {**with_others, **env, **spec.env_vars, **named},
                config.rollout.setup_timeout,
                str(job.allocation.rollout_backend),
                config.vllm.python,
                spec.command,
            )
        )
    return plans


def sglang_arguments(
    config: PPOConfig, rollout: Parallel, device: str, index: int, first_device: int
) -> tuple[list[str], dict[str, str]]:
    adapted = config.sglang.lora_target_modules or config.actor.target_modules or [ALL_LINEAR]
    options = replace(
        config.sglang,
        random_seed=config.sglang.random_seed + index,
        lora_target_modules=adapted if config.sglang.enable_lora else None,
        enable_return_routed_experts=config.sglang.enable_return_routed_experts
        or config.rollout.return_routed_experts,
    )
    args = sglang.server_args(options, device, tensor_size=rollout.tensor, base_gpu_id=first_device)
    return args, sglang.cpu_environment() if device == "cpu" else {}


def vllm_arguments(
    config: PPOConfig, rollout: Parallel, device: str, index: int
) -> tuple[list[str], dict[str, str]]:
    options = replace(config.vllm, seed=config.vllm.seed + index)
    args = vllm.server_args(options, device, tensor_size=rollout.tensor, pipeline_size=rollout.pipeline)
    return args, vllm.server_environment(device)


def command_of(plan: ServerPlan) -> list[str]:
    if plan.engine == "vllm":
        return vllm.server_command(plan.model_path, plan.args, plan.python, plan.command)
    return sglang.server_command(plan.model_path, plan.args, command=plan.command)


def start_server(plan: ServerPlan, host: str = "127.0.0.1") -> InferenceServer:
    log, ready_timeout_s = Path(plan.log), plan.ready_timeout_s
    return InferenceServer(command_of(plan), log, plan.env, host=host, ready_timeout_s=ready_timeout_s)
