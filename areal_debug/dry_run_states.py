"""Memory that a rank needs throughout a run: master weights, optimizer states, gradients."""

from dataclasses import dataclass

from areal_core.allocation import Parallel
from areal_core.config import OptimizerConfig, TrainEngineConfig

FP32 = 4
# Bytes per element; the names are also SGLang's.
SIZES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "auto": 2}
# Bytes per parameter, and a description.
OPTIMIZER_STATES = {
    "adam": (8, "2 float32 states of adam"),
    "sgd": (0, "0 float32 states of sgd"),
    "adam_bf16": (6, "a bfloat16 and a float32 state of adam_bf16"),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model in elements.

    `undivided` are those of `num_parameters` that every tensor-parallel rank holds: norms, routers.
    `adapter` is the number of parameters that an adapter trains instead; 0 if there is none.
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
    """One item of the memory of a rank or server; `how` is its formula."""

    name: str
    size_bytes: int
    how: str
    is_on_host: bool = False


@dataclass(frozen=True)
class Model:
    """A model of which each rank has a shard. `has_scores`: its head returns one number."""

    name: str
    options: TrainEngineConfig
    trains: bool = False
    has_scores: bool = False


def state_parts(model: Model, shape: Shape, sizes: Parallel) -> list[Part]:
    """Estimate what stays in memory for the duration of the run, in shards of equal size."""
    num_ranks = sizes.world_size
    replicated = shape.undivided if sizes.tensor > 1 else 0
    shard = -(-(shape.num_parameters - replicated) // num_ranks) - (-replicated * sizes.tensor // num_ranks)
    over = f"{shape.num_parameters:,} parameters over {num_ranks} rank{'s' * (num_ranks != 1)}"
    over += f", {replicated:,} of them over {num_ranks // sizes.tensor}" if replicated else ""
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
        size, states = OPTIMIZER_STATES[optimizer.type]
        visits = optimizer.offload or options.fsdp.per_layer_optim_step
        if visits and not all_on_host:
            at_once = "a layer's at a time" if options.fsdp.per_layer_optim_step else "all of them"
            states += f"; on the device while it steps, {at_once}"
        on_host = all_on_host or visits
        parts.append(Part(f"{model.name}: optimizer", size * shard, states, on_host))
        parts.append(Part(f"{model.name}: gradients", FP32 * shard, "float32, sharded", all_on_host))
    return parts


def not_estimated(options: TrainEngineConfig) -> list[str]:
    """Name the options in use whose effect on memory is not estimated."""
    in_use = {
        "effect of fsdp.compile": options.fsdp.compile,
        "savings of use_liger": options.use_liger,
        "memory that offload releases while the model is idle": options.offload
        and not options.fsdp.offload_params,
    }
    return [reason for reason, is_on in in_use.items() if is_on]
