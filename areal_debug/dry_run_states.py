"""What a rank holds of each model as long as the run lasts: masters, optimiser states and gradients, and whether on its device."""

from dataclasses import dataclass

from areal_core.allocation import Parallel
from areal_core.config import OptimizerConfig, TrainEngineConfig

FP32 = 4
SIZES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "auto": 2}  # SGLang's names, too
# Bytes a parameter, and what they are.
OPTIMISER_STATES = {
    "adam": (8, "2 float32 states of adam"),
    "sgd": (0, "0 float32 states of sgd"),
    "adam_bf16": (6, "a bfloat16 and a float32 state of adam_bf16"),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, in elements. `undivided` are those of `num_parameters` that tensor-parallel ranks hold alike: norms, routers.

    `adapter` is what an adapter trains in place of `num_parameters`; 0 where there is none.
    """

    num_parameters: int
    undivided: int
    outside_layers: int
    largest_layer: int
    num_layers: int
    hidden: int
    intermediate: int
    vocab: int
    cache_per_token: int
    adapter: int = 0


@dataclass(frozen=True)
class Part:
    """One item of a rank's or a server's memory."""

    name: str
    size_bytes: int
    how: str
    is_on_host: bool = False


@dataclass(frozen=True)
class Model:
    """A model that each rank holds a shard of; `has_scores` says that its head gives one number instead of logits."""

    name: str
    options: TrainEngineConfig
    trains: bool = False
    has_scores: bool = False


def state_parts(model: Model, shape: Shape, sizes: Parallel) -> list[Part]:
    """What lives as long as the run, in shards of equal size."""
    num_ranks = sizes.world_size
    alike = shape.undivided if sizes.tensor > 1 else 0
    shard = -(-(shape.num_parameters - alike) // num_ranks) - (-alike * sizes.tensor // num_ranks)
    over = f"{shape.num_parameters:,} parameters over {num_ranks} rank{'s' * (num_ranks != 1)}"
    over += f", {alike:,} of them over {num_ranks // sizes.tensor}" if alike else ""
    options, all_on_host = model.options, model.options.fsdp.offload_params
    if shape.adapter:
        frozen = Part(
            f"{model.name}: frozen weights",
            SIZES[options.dtype] * shard,
            f"{options.dtype}, {over}",
            all_on_host,
        )
        shard = -(-shape.adapter // num_ranks)
        parts = [
            frozen,
            Part(
                f"{model.name}: adapter", FP32 * shard, f"float32, {shape.adapter:,} parameters", all_on_host
            ),
        ]
    else:
        parts = [Part(f"{model.name}: masters", FP32 * shard, f"float32, {over}", all_on_host)]
    if model.trains:
        optimizer = options.optimizer or OptimizerConfig()
        size, states = OPTIMISER_STATES[optimizer.type]
        visits = optimizer.offload or options.fsdp.per_layer_optim_step
        if visits and not all_on_host:
            at_once = "a layer's at a time" if options.fsdp.per_layer_optim_step else "all of them"
            states += f"; on the device while it steps, {at_once}"
        on_host = all_on_host or visits
        parts.append(Part(f"{model.name}: optimiser", size * shard, states, on_host))
        parts.append(Part(f"{model.name}: gradients", FP32 * shard, "float32, sharded", all_on_host))
    return parts


def not_reckoned(options: TrainEngineConfig) -> list[str]:
    """What options in use change, and nobody reckons."""
    in_use = {
        "what fsdp.compile saves or costs": options.fsdp.compile,
        "what use_liger saves": options.use_liger,
        "what offload gives back while the model is idle": options.offload
        and not options.fsdp.offload_params,
    }
    return [reason for reason, is_on in in_use.items() if is_on]
