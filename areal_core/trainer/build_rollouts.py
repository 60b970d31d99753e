"""Builders of rollouts and validation: engine, weight update, workflow, filter and executor."""

import inspect
import os
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from areal_core.agent.agent_workflow import AgentWorkflow
from areal_core.agent.agents import is_agent
from areal_core.config import AgentConfig, GenerationHyperparameters, PPOConfig
from areal_core.config.import_paths import import_object
from areal_core.config.servers import serves_adapters
from areal_core.config.services import SchedulerConfig
from areal_core.data.batch import Batch
from areal_core.data.loader import PromptLoader
from areal_core.data.processor import VisionProcessor, load_processor
from areal_core.embedded.engine import EmbeddedEngine, ReplicaUpdate
from areal_core.embedded.replica import Replica
from areal_core.engine.lora import Adapter
from areal_core.engine.ranks import Ranks
from areal_core.engine.routers import routing_sizes_of
from areal_core.errors import ConfigError
from areal_core.launch.job import served_model
from areal_core.paths import run_folder
from areal_core.reward import RewardPool
from areal_core.reward.served import RewardServer
from areal_core.reward.signature import check_columns, check_reward_fn
from areal_core.rollout.episodes import AcceptFn
from areal_core.rollout.errors import RequestRefused
from areal_core.rollout.pipeline import Executor
from areal_core.rollout.source import RolloutSource
from areal_core.rollout.staleness import StalenessControl, per_rank
from areal_core.rollout.types import InferenceEngine
from areal_core.rollout.vision_workflow import VisionRLVRWorkflow
from areal_core.rollout.workflow import RLVRWorkflow, RolloutWorkflow, WrittenWorkflow
from areal_core.servers.client import FleetClient
from areal_core.servers.delta import Delta
from areal_core.servers.discovery import Discovery, FolderNames, discover, wait_until_ready
from areal_core.servers.pool import ServerPool
from areal_core.servers.server import Server, call
from areal_core.servers.verification import WeightCheck
from areal_core.servers.weight_update import AdapterUpdate, BroadcastUpdate, DiskUpdate, WeightUpdate
from areal_core.servers.wire import Call
from areal_core.servers.wires import wire_of
from areal_core.telemetry.stats import Stats
from areal_core.trainer.checkpointing import Frequency
from areal_core.trainer.evaluation import Evaluation
from areal_core.trainer.live import LiveRollouts, SharedRollouts
from areal_core.trainer.scored_rollouts import RewardModel
from areal_core.trainer.shared_devices import SharedDevices, TurnRollouts
from areal_core.trainer.trace_hooks import NO_TRACING, Tracing

NO_LIMIT = 10**12  # versions
HEALTH_FILE = "server_health.json"  # of the requests of rank 0


def build_live_rollouts(
    config: PPOConfig,
    ranks: Ranks,
    loader: PromptLoader,
    workflow: RolloutWorkflow,
    tokenizer: PreTrainedTokenizerBase,
    *,
    should_accept: AcceptFn | None = None,
    num_steps: int | None = None,
    stats: Stats | None = None,
    tracing: Tracing = NO_TRACING,
    processor: VisionProcessor | None = None,
    devices: SharedDevices | None = None,
) -> LiveRollouts:
    """Build the rollouts of this rank's prompts, on the engine of the allocation.

    A collective if that engine has servers.

    Args:
        num_steps: the run's total; no prompts are started for later ones.
        processor: of the pictures of a vision model.
        devices: those that servers share with the trainer; then these have no weight update.

    Raises:
        ConfigError: the allocation has no rollout engine.
    """
    backend = config.allocation.rollout_backend
    if backend is None:
        raise ConfigError(
            f"allocation_mode is {config.allocation_mode!r}, which has no rollout engine: add 'sglang:dN+' or "
            f"'embedded|' in front, or replay a record"
        )
    engine: InferenceEngine
    weight_update: WeightUpdate | None
    if backend == "embedded":
        engine, weight_update = build_embedded(config, ranks, tokenizer, processor)
    elif devices is not None:
        fixed = Discovery(tuple(devices.servers))
        engine, weight_update = build_client(config, devices.servers, fixed, knows_versions=True), None
    else:
        engine, weight_update = build_servers(config, ranks)
    options = config.rollout
    executor = Executor(
        engine,
        StalenessControl(
            batch_size=per_rank(config.train_dataset.batch_size, ranks.data_parallel_size),
            max_concurrent=prompts_at_once(config, ranks),
            max_head_offpolicyness=options.max_head_offpolicyness,
            num_steps=num_steps,
        ),
        max_failures=options.max_failures,
        check_format=options.check_trajectory_format,
        holds_rejected=config.dynamic_bs,
        drops_incomplete=config.gconfig.drop_incomplete_group or config.gconfig.reward_normalization,
    )
    if options.dump_to_file:
        workflow = WrittenWorkflow(workflow, run_folder(config, "logs") / "rollout", tokenizer)
    return LiveRollouts(
        executor,
        loader,
        tracing.workflow(workflow),
        tracing.weight_update(weight_update),
        n_samples=config.gconfig.n_samples,
        should_accept=should_accept,
        stats=stats,
        adapter_only=serves_adapters(config),
        health=engine.health if isinstance(engine, FleetClient) else None,
        health_file=run_folder(config, "logs") / HEALTH_FILE if ranks.rank == 0 else None,
    )


def share_devices(
    config: PPOConfig, ranks: Ranks, leave: Callable[[], int], stats: Stats
) -> SharedDevices | None:
    """Wait for the servers that share the trainer's devices, and let them release their memory.

    A collective, before models are built. None if no server shares a device.

    Args:
        leave: as of `SharedDevices`.

    Raises:
        NoServers, ServerDied, WrongServer: as `build_servers` does.
        SharingFailed: a server cannot release its memory.
    """
    if not config.allocation.shares_devices:
        return None
    servers = wait_until_ready(discover_servers(config), config.rollout.setup_timeout)
    ranks.barrier()  # a server that is asleep would seem not to be ready
    pool = None
    if ranks.rank == 0:
        pool = build_pool(config, servers, Discovery(tuple(servers)))
        pool.check_model()
    devices = SharedDevices(servers, build_disk_update(config, pool), ranks.barrier, leave, stats)
    devices.to_trainer()
    return devices


def share_rollouts(
    config: PPOConfig, ranks: Ranks, live: LiveRollouts | None, devices: SharedDevices | None = None
) -> RolloutSource:
    """Return the source of this rank: its own rollouts, or those of its group's rank 0.

    Args:
        live: the rollouts of rank 0 of the group; None on its other ranks.
        devices: those that servers share with the trainer.
    """
    if devices is not None:
        sampled = SharedRollouts(live, None, ranks.share) if ranks.model_parallel_size > 1 else live
        assert sampled is not None
        return TurnRollouts(sampled, devices)
    if ranks.model_parallel_size == 1:
        assert live is not None
        return live
    weight_update = None
    if live is None and config.allocation.has_servers:
        ranks.barrier()  # the other ranks are at the one in `build_servers`
        weight_update = build_weight_update(config, ranks, pool=None)
    return SharedRollouts(live, weight_update, ranks.share, serves_adapters(config))


def build_evaluation(
    config: PPOConfig,
    ranks: Ranks,
    live: LiveRollouts | None,
    workflow: Callable[[], RolloutWorkflow],
    dataset: Sequence[dict[str, Any]],
    frequency: Frequency,
    stats: Stats,
    reward_model: RewardModel | None = None,
    turn: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Evaluation:
    """Build the validation, on the engine and event loop of the training prompts.

    Its staleness is not limited.

    Args:
        live: None on a rank for which rank 0 of its model-parallel group validates; `workflow` is
            not called there.
        turn: as of `Evaluation`.
    """
    if live is None:
        return Evaluation(None, (), frequency, stats, reward_model=reward_model, turn=turn)
    executor = Executor(
        live.executor.engine,
        StalenessControl(1, prompts_at_once(config, ranks), NO_LIMIT),
        loop=live.executor.loop,
        max_failures=config.rollout.max_failures,
        check_format=config.rollout.check_trajectory_format,
    )
    rows = [(i, dataset[i]) for i in range(ranks.data_parallel_rank, len(dataset), ranks.data_parallel_size)]
    num_samples = eval_gconfig(config).n_samples
    return Evaluation(executor, rows, frequency, stats, workflow(), num_samples, reward_model, turn)


def eval_gconfig(config: PPOConfig) -> GenerationHyperparameters:
    """Return the sampling options of validation: `eval_gconfig`, or else `gconfig`."""
    return config.eval_gconfig or config.gconfig


def prompts_at_once(config: PPOConfig, ranks: Ranks) -> int:
    """Return this rank's share of `rollout.max_concurrent_rollouts`, by default of one batch."""
    total = config.rollout.max_concurrent_rollouts or config.train_dataset.batch_size
    return per_rank(total, ranks.data_parallel_size)


def build_embedded(
    config: PPOConfig,
    ranks: Ranks,
    tokenizer: PreTrainedTokenizerBase,
    processor: VisionProcessor | None = None,
) -> tuple[InferenceEngine, WeightUpdate]:
    replica = Replica(
        config.actor.path,
        getattr(torch, config.actor.dtype),
        ranks.device,
        processor,
        keeps_experts=config.rollout.return_routed_experts,
        keeps_weights=config.rollout.return_routed_weights,
        is_invariant=config.actor.attn_impl == "batch_invariant",
    )
    engine = EmbeddedEngine(
        replica,
        replica.model.config.get_text_config().vocab_size,
        seed=config.seed,
        end_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id or 0,
        device=ranks.device,
    )
    return engine, ReplicaUpdate(replica, engine)


def build_servers(config: PPOConfig, ranks: Ranks) -> tuple[InferenceEngine, WeightUpdate]:
    """Build the client of the run's servers, once they serve the first weights; a collective.

    Raises:
        NoServers: none is known.
        ServerDied: one is not ready in time.
        WrongServer: one has another protocol version or serves another model.
    """
    options = config.rollout
    discovery = discover_servers(config)
    if ranks.rank == 0:
        continue_generation(discovery.configured, wire_of(config.allocation).resume())
    servers = wait_until_ready(discovery, options.setup_timeout)
    pool = build_pool(config, servers, discovery) if ranks.rank == 0 else None
    if pool is not None:
        pool.check_model()
        pool.load_first_weights(version=0)
    ranks.barrier()
    client = build_client(config, servers, discovery, knows_versions=True)
    return client, build_weight_update(config, ranks, pool)


def continue_generation(servers: Sequence[Server], resume: Call) -> None:
    """Resume servers that a run has left paused because it was killed during a weight update.

    SGLang's `/health` does not answer while it is paused.
    """
    for server in servers:
        with suppress(OSError, RequestRefused):  # not ready yet: it is not paused either
            call(server, "POST", resume.path, resume.payload, timeout_s=5.0)


def build_client(
    config: PPOConfig, servers: list[Server], discovery: Discovery, *, knows_versions: bool
) -> FleetClient:
    """Build the client of servers; `knows_versions` if only this run updates them."""
    options = config.rollout
    return FleetClient(
        servers,
        wire_of(config.allocation),
        timeout_s=options.request_timeout,
        num_retries=options.request_retries,
        discovery=discovery,
        model=served_model(config),
        server_wait_s=options.setup_timeout,
        pause_mode=options.pause_mode,
        lora_name=config.gconfig.lora_name if serves_adapters(config) else None,
        knows_versions=knows_versions,
        sizes=routing_sizes_of(config.actor.path) if options.return_routed_experts else None,
        seed=config.seed if options.deterministic_sampling else None,
    )


def discover_servers(config: PPOConfig, addresses: Sequence[str] = ()) -> Discovery:
    """Find the servers: `addresses`, else those in `AREAL_LLM_SERVER_ADDRS`, and registered ones.

    Raises:
        NoServers: there is none.
    """
    names = FolderNames(config.cluster.name_resolve.nfs_record_root)
    return discover(addresses, os.environ, names, config.experiment_name, config.trial_name)


def build_pool(config: PPOConfig, servers: list[Server], discovery: Discovery) -> ServerPool:
    return ServerPool(
        servers,
        wire_of(config.allocation),
        discovery=discovery,
        model=served_model(config),
        pause_mode=config.rollout.pause_mode,
    )


def build_weight_update(config: PPOConfig, ranks: Ranks, pool: ServerPool | None) -> WeightUpdate:
    has_deltas = config.actor.enable_delta_weight_update
    check = WeightCheck(1 if has_deltas else config.rollout.verify_weights_every)
    delta = Delta(config.actor.weight_update_anchor_interval) if has_deltas else None
    grace_s = config.rollout.pause_grace_period
    actor, folder = config.actor, run_folder(config, "checkpoints") / "weight_update"
    if serves_adapters(config):
        adapter = Adapter(actor.lora_rank, actor.lora_alpha, actor.path)
        return AdapterUpdate(pool, folder, adapter, config.gconfig.lora_name, check=check, grace_s=grace_s)
    if actor.weight_update_mode == "disk":
        return build_disk_update(config, pool)
    rollout = config.allocation.rollout
    assert rollout is not None
    backend = "nccl" if ranks.device.type == "cuda" else "gloo"
    ranks_per_server = rollout.world_size // rollout.data
    return BroadcastUpdate(
        pool, backend, ranks_per_server=ranks_per_server, check=check, grace_s=grace_s, delta=delta
    )


def build_disk_update(config: PPOConfig, pool: ServerPool | None) -> DiskUpdate:
    return DiskUpdate(
        pool,
        run_folder(config, "checkpoints") / "weight_update",
        Path(config.actor.path),
        check=WeightCheck(config.rollout.verify_weights_every),
        grace_s=config.rollout.pause_grace_period,
    )


def build_workflow(
    workflow: RolloutWorkflow | type | str,
    arguments: dict[str, Any],
    gconfig: Any,
    tokenizer: PreTrainedTokenizerBase,
    closing: Callable[[Callable[[], None]], object],
    tracing: Tracing = NO_TRACING,
    agent_options: AgentConfig | None = None,
    processor: VisionProcessor | None = None,
    columns: Collection[str] = (),
) -> RolloutWorkflow:
    """Build a workflow from an instance, a class, or the import path of a class.

    An agent (`async def run(data, ...)`) is wrapped in a workflow. `reward_fn` (a function or its
    import path) becomes a pool of processes, unless it is asynchronous; `tokenizer` and `processor`
    (paths) become the run's. A class gets `gconfig`, `tokenizer` and `processor` if it takes them.

    Args:
        arguments: of the class.
        closing: receives the functions to call when the run ends.
        columns: of the rows, if known: all arguments that `reward_fn` needs are among them.

    Raises:
        ConfigError: the path cannot be imported, or the object has no `arun_episode`, or its class
            takes other arguments.
        RewardError: `reward_fn` cannot be called as one.
        NotAnAgent: its `run` is not asynchronous, or it cannot be constructed.
    """
    found = find_workflow(workflow)
    if is_agent(found):
        agent_kwargs = {key: value for key, value in arguments.items() if key != "gconfig"}
        built = AgentWorkflow(
            workflow, arguments.get("gconfig", gconfig), tokenizer, agent_options, agent_kwargs, processor
        )
        closing(built.close)
        return built
    if not callable(getattr(found, "arun_episode", None)):
        raise ConfigError(
            f"workflow {found!r} has no method arun_episode(engine, data): give a RolloutWorkflow"
            ", or an agent with async def run(self, data, **extra_kwargs)"
        )
    if not isinstance(found, type):
        return found
    accepted = inspect.signature(found).parameters
    has_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    given: dict[str, Any] = {"gconfig": gconfig, "tokenizer": tokenizer}
    if processor is not None:
        given["processor"] = processor
    arguments = {name: value for name, value in given.items() if has_any or name in accepted} | arguments
    if isinstance(arguments.get("tokenizer"), str):
        arguments["tokenizer"] = tokenizer
    if isinstance(path := arguments.get("processor"), str):
        arguments["processor"] = processor or load_processor(path)
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"workflow {found.__qualname__} cannot be constructed from {', '.join(arguments) or 'no argument'}: {error}"
        ) from error
    if "reward_fn" in arguments:
        reward = arguments["reward_fn"]
        if not any(map(inspect.iscoroutinefunction, (reward, type(reward).__call__))):
            takes_row = found in (RLVRWorkflow, VisionRLVRWorkflow)
            check_reward_fn(reward, sys.path, takes_row)
            if takes_row and columns and inspect.isfunction(reward):
                check_columns(reward.__name__, inspect.signature(reward), columns)
            reward = RewardPool(reward, num_workers=1)
            closing(reward.close)
        arguments["reward_fn"] = tracing.reward(reward)
    return found(**arguments)


def with_served_rewards(
    workflow: Any, arguments: dict[str, Any], scheduler: SchedulerConfig
) -> dict[str, Any]:
    """Return a workflow's arguments, with the reward model of `scheduler` as its reward function.

    Raises:
        ConfigError: the workflow has its rewards already.
    """
    if not scheduler.reward_model_path:
        return arguments
    if not isinstance(workflow, type | str) or "reward_fn" in arguments:
        given = "reward_fn" if "reward_fn" in arguments else "instance"
        raise ConfigError(
            f"scheduler.reward_model_path is {scheduler.reward_model_path!r} and the script gives the workflow's {given}: remove "
            "one of them, or add the scores with reward_model.path"
        )
    server = RewardServer(scheduler.reward_model_service_url, scheduler.reward_model_path)
    return arguments | {"reward_fn": server}


def find_workflow(workflow: RolloutWorkflow | type | str) -> Any:
    """Return the object itself, or the one at an import path. Raises ConfigError."""
    return import_object(workflow, "workflow") if isinstance(workflow, str) else workflow


def build_filter(dynamic_sampling: bool, filter_fn: AcceptFn | str | None) -> AcceptFn | None:
    """Return the filter of prompts: `actor.dynamic_sampling`, the user's function, both or None.

    The function can be given by its import path.
    """
    filters: list[AcceptFn] = [rewards_differ] if dynamic_sampling else []
    if filter_fn is not None:
        filters.append(
            import_object(filter_fn, "dynamic_filter_fn") if isinstance(filter_fn, str) else filter_fn
        )
    return (lambda rows: all(accepts(rows) for accepts in filters)) if filters else None


def rewards_differ(rows: Batch) -> bool:
    """Return whether the rewards of a group differ: otherwise all its advantages are 0.

    Source: DAPO, arXiv 2503.14476, section 3.2.
    """
    return bool(rows["rewards"].max() > rows["rewards"].min())
