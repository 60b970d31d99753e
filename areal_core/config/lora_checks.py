"""Options of adapters (LoRA) that must agree; see `checks.py`.

A weight update sends servers the adapter alone if `serves_adapters`, else the merged weights.
"""

from collections.abc import Iterator

from areal_core.config.engine import TrainEngineConfig
from areal_core.config.experiment import BaseExperimentConfig, DPOConfig, PPOConfig

ALL_LINEAR = "all-linear"  # upstream's name of every linear layer
# Adapters in a server's memory: the previous version stays until every client requests the new one.
ADAPTERS_AT_ONCE = 2


def serves_adapters(config: PPOConfig) -> bool:
    """Return whether weight updates send servers the adapter alone."""
    requested = config.rollout.use_lora or bool(config.sglang.enable_lora)
    return config.actor.use_lora and requested and config.allocation.rollout_backend == "sglang"


def is_base_of(reference: TrainEngineConfig | None, actor: TrainEngineConfig) -> bool:
    """Return whether a reference (None: the initial actor) is the actor without its adapter.

    It is equal bit for bit then, and needs no second model.
    """
    names = ("path", "dtype", "temperature", "mb_spec", "attn_impl", "use_liger", "init_from_scratch")
    return actor.use_lora and (
        reference is None or all(getattr(reference, name) == getattr(actor, name) for name in names)
    )


def adapters_have_a_size(config: BaseExperimentConfig) -> Iterator[str]:
    for name, model in {"actor": config.actor, "critic": other_model(config, "critic")}.items():
        if model is None or not model.use_lora:
            continue
        if model.lora_rank < 1 or model.lora_alpha <= 0:
            yield f"{name}.lora_rank is {model.lora_rank} and {name}.lora_alpha is {model.lora_alpha}; expected 1 or more, and above 0"
        train = config.allocation.train
        if train is not None and train.tensor > 1:
            yield (
                f"{name}.use_lora is True and the allocation trains with {train}; adapters are not sharded over "
                "tensor-parallel ranks: use t1"
            )


def only_trained_models_have_adapters(config: BaseExperimentConfig) -> Iterator[str]:
    for name in ("ref", "teacher"):
        model = other_model(config, name)
        if model is not None and model.use_lora:
            yield f"{name}.use_lora is True and {name} is not trained; set it to false"


def other_model(config: BaseExperimentConfig, name: str) -> TrainEngineConfig | None:
    """Return a section of a model other than the actor; None if it is missing or empty."""
    has_it = isinstance(config, PPOConfig) or (isinstance(config, DPOConfig) and name == "ref")
    return getattr(config, name) if has_it else None


def adapters_are_trained_where_requested(config: PPOConfig) -> Iterator[str]:
    for name, requested in {
        "rollout.use_lora": config.rollout.use_lora,
        "sglang.enable_lora": config.sglang.enable_lora,
    }.items():
        if requested and not config.actor.use_lora:
            yield f"{name} is True and actor.use_lora is False; there is no adapter to sample with: set both to the same value"


def servers_take_adapters(config: PPOConfig) -> Iterator[str]:
    if not serves_adapters(config):
        return
    actor, sglang = config.actor, config.sglang
    if not sglang.enable_lora:
        yield f"rollout.use_lora is True and sglang.enable_lora is {sglang.enable_lora}; the servers would refuse adapters: set it to true"
    if sglang.max_lora_rank is None or sglang.max_lora_rank < actor.lora_rank:
        yield (
            f"sglang.max_lora_rank is {sglang.max_lora_rank} and actor.lora_rank is {actor.lora_rank}; "
            "the first must be at least the second"
        )
    if sglang.max_loaded_loras < ADAPTERS_AT_ONCE:
        yield (
            f"sglang.max_loaded_loras is {sglang.max_loaded_loras}; a weight update needs {ADAPTERS_AT_ONCE}: "
            "the new adapter and the previous one"
        )
    served, wanted = sglang.lora_target_modules or [ALL_LINEAR], actor.target_modules or [ALL_LINEAR]
    if not {ALL_LINEAR, "all"} & set(served) and not set(wanted) <= set(served):
        yield f"sglang.lora_target_modules is {served} and actor.target_modules is {wanted}; the first must include all of the second"
    if actor.weight_update_mode != "disk":
        yield (
            f"actor.weight_update_mode is {actor.weight_update_mode!r} and servers are sent adapters, which SGLang loads only from a "
            "folder: set it to disk, or rollout.use_lora and sglang.enable_lora to false for merged weights"
        )
    if config.rollout.pause_mode != "abort":
        yield (
            f"rollout.pause_mode is {config.rollout.pause_mode!r} and servers are sent adapters; a request continues with the "
            "adapter that it started with, and only an aborted one uses the new adapter: set it to abort"
        )
    if not config.gconfig.lora_name:
        yield "gconfig.lora_name is empty; give the adapter a name"


LORA_COUPLINGS = (adapters_have_a_size, only_trained_models_have_adapters)
SERVED_LORA_COUPLINGS = (adapters_are_trained_where_requested, servers_take_adapters)
