"""The options that servers of every engine have, read from the section of the run's engine."""

from dataclasses import dataclass

from areal_core.config.allocation import Allocation
from areal_core.config.experiment import PPOConfig
from areal_core.config.train_engine import TrainEngineConfig

ALL_LINEAR = "all-linear"  # upstream's name of every linear layer


@dataclass(frozen=True)
class ServerOptions:
    """Options of the servers of a run. `names` are their names in a file, by the names here."""

    model: str
    dtype: str
    context_length: int | None
    enable_lora: bool
    max_lora_rank: int | None
    max_adapters: int
    names: dict[str, str]


def server_options(config: PPOConfig, allocation: Allocation) -> ServerOptions:
    """Return the options of the allocation's servers; those of SGLang if it has no servers."""
    sglang, vllm = config.sglang, config.vllm
    if allocation.rollout_backend == "vllm":
        return ServerOptions(
            vllm.model or config.actor.path,
            vllm.dtype,
            vllm.max_model_len,
            vllm.enable_lora,
            vllm.max_lora_rank,
            vllm.max_loras,
            {
                "context_length": "vllm.max_model_len",
                "enable_lora": "vllm.enable_lora",
                "max_lora_rank": "vllm.max_lora_rank",
                "max_adapters": "vllm.max_loras",
            },
        )
    return ServerOptions(
        sglang.model_path or config.actor.path,
        sglang.dtype,
        sglang.context_length,
        bool(sglang.enable_lora),
        sglang.max_lora_rank,
        sglang.max_loaded_loras,
        {
            "context_length": "sglang.context_length",
            "enable_lora": "sglang.enable_lora",
            "max_lora_rank": "sglang.max_lora_rank",
            "max_adapters": "sglang.max_loaded_loras",
        },
    )


def serves_adapters(config: PPOConfig) -> bool:
    """Return whether weight updates send servers the adapter alone, not the merged weights."""
    requested = config.rollout.use_lora or server_options(config, config.allocation).enable_lora
    return config.actor.use_lora and requested and config.allocation.has_servers


def is_base_of(reference: TrainEngineConfig | None, actor: TrainEngineConfig) -> bool:
    """Return whether a reference (None: the initial actor) is the actor without its adapter.

    It is equal bit for bit then, and needs no second model.
    """
    names = (
        "path", "dtype", "temperature", "mb_spec", "attn_impl", "use_liger", "init_from_scratch", "enable_tree_training",
    )  # fmt: skip
    return actor.use_lora and (
        reference is None or all(getattr(reference, name) == getattr(actor, name) for name in names)
    )
