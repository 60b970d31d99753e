"""The options that servers of every engine have, read from the section of the run's engine."""

from dataclasses import dataclass, fields

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


# Names of these options in a section, whose other options have the name here.
NAMES = {
    "sglang": {"model": "model_path", "max_adapters": "max_loaded_loras"},
    "vllm": {"context_length": "max_model_len", "max_adapters": "max_loras"},
}


def server_options(config: PPOConfig, allocation: Allocation) -> ServerOptions:
    """Return the options of the allocation's servers; those of SGLang if it has no servers."""
    engine = "vllm" if allocation.rollout_backend == "vllm" else "sglang"
    options = [field.name for field in fields(ServerOptions) if field.name != "names"]
    names = {option: NAMES[engine].get(option, option) for option in options}
    values = {option: getattr(getattr(config, engine), name) for option, name in names.items()}
    values |= {"model": values["model"] or config.actor.path, "enable_lora": bool(values["enable_lora"])}
    return ServerOptions(**values, names={option: f"{engine}.{name}" for option, name in names.items()})


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
