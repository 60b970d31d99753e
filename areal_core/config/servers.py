"""The options that servers of every engine have, read from the section of the run's engine."""

from dataclasses import dataclass

from areal_core.config.allocation import Allocation
from areal_core.config.experiment import PPOConfig


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
