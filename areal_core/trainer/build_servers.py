"""Builders of the client of the inference servers and of their weight update."""

import os
from pathlib import Path

from areal_core.config import PPOConfig
from areal_core.config.lora_checks import serves_adapters
from areal_core.engine.lora import Adapter
from areal_core.engine.ranks import Ranks
from areal_core.paths import run_folder
from areal_core.rollout.adapter_push import AdapterUpdate
from areal_core.rollout.discovery import Discovery, discover, wait_until_ready
from areal_core.rollout.engine import InferenceEngine
from areal_core.rollout.name_service import FolderNames
from areal_core.rollout.server_identity import RunModel, run_model
from areal_core.rollout.server_pool import ServerPool
from areal_core.rollout.servers import Server
from areal_core.rollout.sglang_client import SGLangClient
from areal_core.rollout.weight_check import WeightCheck
from areal_core.rollout.weight_push import BroadcastUpdate, DiskUpdate, WeightUpdate


def build_sglang(config: PPOConfig, ranks: Ranks) -> tuple[InferenceEngine, WeightUpdate]:
    """Build the client of the run's servers, once they serve the first weights; a collective.

    Raises:
        NoServers: none is known.
        ServerDied: one is not ready in time.
        WrongServer: one has another protocol version or serves another model.
    """
    options = config.rollout
    discovery = discover_servers(config)
    servers = wait_until_ready(discovery, options.setup_timeout)
    pool = build_pool(config, servers, discovery) if ranks.rank == 0 else None
    if pool is not None:
        pool.check_model()
        pool.load_first_weights(version=0)
    ranks.barrier()
    client = SGLangClient(
        servers,
        timeout_s=options.request_timeout,
        num_retries=options.request_retries,
        discovery=discovery,
        model=served_model(config),
        server_wait_s=options.setup_timeout,
        pause_mode=options.pause_mode,
        lora_name=config.gconfig.lora_name if serves_adapters(config) else None,
    )
    return client, build_push(config, ranks, pool)


def discover_servers(config: PPOConfig) -> Discovery:
    """Find the servers configured in `AREAL_LLM_SERVER_ADDRS` or announced in the name service.

    Raises:
        NoServers: there is none.
    """
    names = FolderNames(config.cluster.name_resolve.nfs_record_root)
    return discover((), os.environ, names, config.experiment_name, config.trial_name)


def build_pool(config: PPOConfig, servers: list[Server], discovery: Discovery) -> ServerPool:
    """Build the control connection of rank 0 to the servers."""
    return ServerPool(
        servers,
        discovery=discovery,
        model=served_model(config),
        pause_mode=config.rollout.pause_mode,
    )


def served_model(config: PPOConfig) -> RunModel:
    """Return the model that every server of the run must serve."""
    path = config.sglang.model_path or config.actor.path
    return run_model(path, needs_adapters=serves_adapters(config))


def build_push(config: PPOConfig, ranks: Ranks, pool: ServerPool | None) -> WeightUpdate:
    """Build the weight update of `actor.weight_update_mode`; of adapters, if servers load them."""
    check = WeightCheck(config.rollout.verify_weights_every)
    grace_s = config.rollout.pause_grace_period
    actor, folder = config.actor, run_folder(config, "checkpoints") / "weight_update"
    if serves_adapters(config):
        adapter = Adapter(actor.lora_rank, actor.lora_alpha, actor.path)
        return AdapterUpdate(pool, folder, adapter, config.gconfig.lora_name, check=check, grace_s=grace_s)
    if actor.weight_update_mode == "disk":
        return DiskUpdate(pool, folder, Path(actor.path), check=check, grace_s=grace_s)
    rollout = config.allocation.rollout
    assert rollout is not None
    backend = "nccl" if ranks.device.type == "cuda" else "gloo"
    ranks_per_server = rollout.world_size // rollout.data
    return BroadcastUpdate(pool, backend, ranks_per_server=ranks_per_server, check=check, grace_s=grace_s)
