"""Options of upstream that load and whose feature is not supported, so that none is silent.

An option that would change results is refused; one that would not gets a note.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from areal_core.config.experiment import BaseExperimentConfig
from areal_core.config.train_engine import PPOActorConfig, TrainEngineConfig


@dataclass(frozen=True)
class NotYet:
    """An option that loads, but whose feature is not supported.

    `harmless` lists the values that change nothing. Any other is refused or, if it cannot affect
    training, noted.
    """

    option: str
    harmless: tuple[Any, ...]
    instead: str
    refused: bool = True


UPSTREAM_EXTENSION = "areal.engine.vllm_ext.vllm_worker_extension.VLLMWorkerExtension"
NO_SCALING = "losses are scaled for Megatron only, which is not supported"
NO_REWARD_SERVICE = "reward functions run in processes of the trainer: give a reward function to the workflow"

NOT_YET = (
    NotYet("*gconfig.use_beam_search", (False,), "only sampling is supported: set it to false"),
    NotYet("*.use_kernels", (False,), "kernels are not fetched from the hub: set it to false; use_liger has fused ones"),
    NotYet("*.fsdp.shard_vision_across_sp", (False,), "each rank of a sequence group computes the whole tower: set it to false"),
    NotYet("sglang.enable_ep_moe", (False,), "SGLang 0.5.23 has no such flag: use sglang.ep_size"),
    NotYet("sglang.enable_deepep_moe", (False,), "SGLang 0.5.23 has no such flag: set it to false"),
    NotYet("sglang.enable_fast_load", (False,), "SGLang 0.5.23 has no such flag: set it to false"),
    NotYet("sglang.torchao_config", ("",), "SGLang 0.5.23 has no such flag: leave it empty"),
    NotYet("sglang.cuda_graph_max_bs", (None,), "SGLang 0.5.23 calls it sglang.cuda_graph_max_bs_decode"),
    NotYet("sglang.cuda_graph_bs", (None,), "SGLang 0.5.23 calls it sglang.cuda_graph_bs_decode"),
    NotYet("train_dataset.drop_last", (True,), "only full batches are trained: set it to true"),
    NotYet("scheduler.functioncall_service_domain", ("", "http://localhost:8080"), NO_REWARD_SERVICE, refused=False),
    NotYet("scheduler.reward_functioncall_config", ({},), NO_REWARD_SERVICE, refused=False),
    NotYet("scheduler.endpoint", ("", "http://localhost:8081"), "scheduler.type starts processes, no service", refused=False),
    NotYet("scheduler.deploy_mode", ("", "separation"), "servers and ranks are separate processes, by allocation_mode", refused=False),
    NotYet("rollout.agent.mode", ("inline", "online"), "agents run on an event loop of this process", refused=False),
    NotYet("rollout.agent.subproc_max_workers", (4,), "agents run on an event loop of this process", refused=False),
    NotYet("actor.log_agent_stats", (False,), "agents' own statistics are not logged", refused=False),
    NotYet("actor.log_agent_stats_keys", ([],), "agents' own statistics are not logged", refused=False),
    NotYet("*.pad_to_maximum", (False,), "micro-batches are not padded; results do not change", refused=False),
    NotYet("*.fsdp.optim_step_prefetch_layers", (1,), "the states of a layer are fetched when it is stepped", refused=False),
    NotYet("*.optimizer.initial_loss_scale", (2.0**32,), NO_SCALING, refused=False),
    NotYet("*.optimizer.min_loss_scale", (1.0,), NO_SCALING, refused=False),
    NotYet("*.optimizer.loss_scale_window", (5.0,), NO_SCALING, refused=False),
    NotYet("*.optimizer.hysteresis", (2,), NO_SCALING, refused=False),
    NotYet("*_dataset.num_workers", (0,), "rows are read before the first step, by the trainer's process", refused=False),
    NotYet("*_dataset.pin_memory", (False,), "rows are not tensors, so there is no memory to pin", refused=False),
    NotYet("valid_dataset.shuffle", (False,), "all validation rows are used, in their order", refused=False),
    NotYet("rollout.queue_size", (None,), "prompts wait in the loader: rollout.max_concurrent_rollouts limits them", refused=False),
    NotYet("cluster.cluster_name", ("local",), "the experiment and trial name a run", refused=False),
    NotYet("cluster.name_resolve.type", ("nfs",), "names are files below its nfs_record_root", refused=False),
    NotYet("cluster.name_resolve.etcd3_addr", ("localhost:2379",), "names are files below nfs_record_root", refused=False),
    NotYet("cluster.name_resolve.ray_actor_name", ("ray_kv_store",), "names are files below nfs_record_root", refused=False),
    NotYet("vllm.worker_extension_cls", ("", UPSTREAM_EXTENSION), "workers are extended by our own class", refused=False),
    NotYet("vllm.swap_space", (4,), "vLLM 0.32 has no such flag, and swaps nothing", refused=False),
    NotYet("vllm.max_seq_len_to_capture", (None, 32768), "vLLM 0.32 has no such flag", refused=False),
    NotYet("stats_logger.swanlab.*", ("disabled", None), "use stats.jsonl, TensorBoard, Weights & Biases or Trackio", refused=False),
)  # fmt: skip

RUN_NAMES = ("experiment_name", "trial_name", "fileroot")


def not_yet(values: dict[str, Any], refused: bool) -> Iterator[str]:
    """Yield one sentence for each unsupported feature that the values of options request."""
    for row in NOT_YET:
        if row.refused != refused:
            continue
        given = [
            f"{name} is {shown(value)}"
            for name, value in values.items()
            if fnmatch(name, row.option) and value not in row.harmless
        ]
        if given:
            yield f"{', '.join(given)}, which is not available: {row.instead}"


def shown(value: Any) -> str:
    """Return the value, or `given` for a section."""
    return "given" if dataclasses.is_dataclass(value) or isinstance(value, dict) else repr(value)


def names_of_another_run(config: BaseExperimentConfig, values: dict[str, Any]) -> Iterator[str]:
    run = dict(
        zip(RUN_NAMES, (config.experiment_name, config.trial_name, config.cluster.fileroot), strict=True)
    )
    for name, value in values.items():
        leaf = name.rpartition(".")[2]
        if "." in name and leaf in run and value and value != run[leaf] and name != "cluster.fileroot":
            of_run = "cluster.fileroot" if leaf == "fileroot" else leaf
            yield f"{name} is {value!r} and {of_run} is {run[leaf]!r}: the latter is used everywhere"


def without_effect_on_a_model(config: BaseExperimentConfig) -> Iterator[str]:
    """Yield sentences on options of models that are not trained, or not served."""
    ref = getattr(config, "ref", None)
    if isinstance(ref, PPOActorConfig):
        plain = {field.name for field in dataclasses.fields(TrainEngineConfig)}
        given = [
            f"ref.{field.name}"
            for field in dataclasses.fields(ref)
            if field.name not in plain and getattr(ref, field.name) != default_of(field)
        ]
        if given:
            yield f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect: a reference only computes logprobs"
    for name in ("ref", "critic", "teacher", "reward_model"):
        model, actor = getattr(config, name, None), config.actor
        if model is None:
            continue
        if model.backend not in ("", actor.backend):
            yield f"{name}.backend is {model.backend!r}, which has no effect: all models are on the ranks of the actor"
        if model.weight_update_mode not in (TrainEngineConfig.weight_update_mode, actor.weight_update_mode):
            yield f"{name}.weight_update_mode is {model.weight_update_mode!r}, which has no effect: only the actor is sent to servers"


def default_of(field: "dataclasses.Field[Any]") -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
