"""Estimate the memory of a rank and a server from the model's `config.json`.

Shapes are computed on the meta device, without weights. States that stay in memory throughout a run
(master weights, optimizer states, gradients) are exact: parameters divided by ranks. Activations
and caches are rough, and their report shows the formula.
"""

from dataclasses import dataclass, replace
from typing import Any

from areal_core.config import DPOConfig, OptimizerConfig, PPOConfig, RWConfig, SFTConfig, TrainEngineConfig
from areal_core.config.allocation import Allocation, Parallel
from areal_core.config.servers import is_base_of, server_options

AnyConfig = PPOConfig | SFTConfig | RWConfig | DPOConfig  # every kind of training has an `actor`

FP32 = 4
# Bytes per element; the names are also SGLang's.
SIZES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "auto": 2}
# Bytes per parameter, and a description.
OPTIMIZER_STATES = {
    "adam": (8, "2 float32 states of adam"),
    "sgd": (0, "0 float32 states of sgd"),
    "adam_bf16": (6, "a bfloat16 and a float32 state of adam_bf16"),
}

# Elements that autograd keeps per token for the backward of one Llama layer, in hidden and
# intermediate widths: two norms in float32 with their outputs, queries twice, keys and values,
# attention, residual; gate, up, activation, product. Tested to be within 15 % of the measured
# size for Llama and Qwen2 layers in float32 and bfloat16.
KEPT_HIDDEN, KEPT_INTERMEDIATE = 12, 4
# Of the hidden widths: queries twice, keys and values, attention; tensor parallelism divides them.
KEPT_IN_HEADS = 5
GATHERED_LAYERS = 2  # FSDP2 gathers the next layer while one computes


@dataclass(frozen=True)
class Shape:
    """Sizes of a model in elements.

    `undivided` are those of `num_parameters` that every tensor-parallel rank holds: norms, routers.
    `adapter` is the number of parameters that an adapter trains instead; 0 if there is none, and
    `tower` of those of a vision tower with its projector, included in `num_parameters`.
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
    tower: int = 0


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


@dataclass(frozen=True)
class Memory:
    """Items of one rank, of one device of a server, and of a rank's host memory.

    `unknown` are the reasons for items that could not be estimated.
    """

    num_parameters: int | None
    rank: tuple[Part, ...]
    host: tuple[Part, ...]
    server: tuple[Part, ...]
    unknown: tuple[str, ...]


def estimate_memory(config: AnyConfig, allocation: Allocation, longest_row: int | None = None) -> Memory:
    """Estimate the memory of a rank and of one device of a server.

    Args:
        longest_row: tokens of the longest prompt, supervised row or side of a pair; None if it is
            not known, where `train_dataset.max_length` bounds it.
    """
    longest_row = config.train_dataset.max_length if longest_row is None else longest_row
    models, sizes = models_of(config), allocation.train or Parallel()
    shape = read_shape(models[0], sizes)
    if shape is None:
        return Memory(None, (), (), (), (f"there is no {config.actor.path}/config.json here",))
    rank: list[Part] = []
    host: list[Part] = []
    unknown: list[str] = []
    if allocation.trains:
        for model in models:
            other = shape if model is models[0] else read_shape(model, sizes)
            if other is None:
                unknown.append(f"{model.name}: there is no {model.options.path}/config.json here")
            else:
                kept = state_parts(model, other, sizes)
                stays = config.device == "cpu"  # all memory is host memory
                rank += [part for part in kept if stays or not part.is_on_host]
                host += [part for part in kept if part.is_on_host and not stays]
                unknown += [f"{model.name}: {reason}" for reason in not_estimated(model.options)]
                if other.tower:
                    unknown.append(f"{model.name}: pixels and activations of the vision tower")
        rank += working_parts(config, shape, sizes, longest_row, unknown)
    server: list[Part] = []
    if isinstance(config, PPOConfig) and not config.debug.replay_rollout_data:
        engine = engine_parts(config, allocation, shape, longest_row)
        if allocation.rollout_backend == "embedded":
            rank += engine
        else:
            server += engine
    return Memory(shape.num_parameters, tuple(rank), tuple(host), tuple(server), tuple(unknown))


def models_of(config: AnyConfig) -> list[Model]:
    models = [Model("actor", config.actor, trains=True, has_scores=isinstance(config, RWConfig))]
    if isinstance(config, DPOConfig) and not is_base_of(config.ref, config.actor):
        models.append(Model("reference", config.ref or config.actor))
    if isinstance(config, PPOConfig):
        if config.critic is not None:
            models.append(Model("critic", config.critic, trains=True, has_scores=True))
        uses_reference = config.actor.uses_reference()
        if config.ref is not None and uses_reference and not is_base_of(config.ref, config.actor):
            models.append(Model("reference", config.ref))
        if config.teacher is not None:
            models.append(Model("teacher", config.teacher))
        if config.reward_model is not None and not config.debug.replay_rollout_data:
            models.append(Model("reward model", config.reward_model, has_scores=True))
    return models


def state_parts(model: Model, shape: Shape, sizes: Parallel) -> list[Part]:
    """Estimate what stays in memory for the duration of the run, in shards of equal size."""
    options, all_on_host = model.options, model.options.fsdp.offload_params
    num_ranks = options.fsdp.shard_size or sizes.world_size
    replicated = shape.undivided if sizes.tensor > 1 else 0
    shard = -(-(shape.num_parameters - replicated) // num_ranks) - (-replicated * sizes.tensor // num_ranks)
    over = f"{shape.num_parameters:,} parameters over {num_ranks} rank{'s' * (num_ranks != 1)}"
    over += f", {replicated:,} of them over {num_ranks // sizes.tensor}" if replicated else ""
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
    if options.freeze_vision_tower and not shape.adapter:
        shard -= shape.tower // num_ranks
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
        if not options.fsdp.sync_every_micro_batch and num_ranks > 1:
            size = SIZES[options.grad_reduce_dtype] * (shape.adapter or shape.num_parameters) // sizes.tensor
            name = f"{model.name}: summed gradients"
            parts.append(Part(name, size, f"{options.grad_reduce_dtype}, full, until the last micro-batch"))
    return parts


def not_estimated(options: TrainEngineConfig) -> list[str]:
    in_use = {
        "effect of fsdp.compile": options.fsdp.compile,
        "savings of use_liger": options.use_liger,
        "memory that offload releases while the model is idle": options.offload
        and not options.fsdp.offload_params,
    }
    return [reason for reason, is_on in in_use.items() if is_on]


def working_parts(
    config: AnyConfig, shape: Shape, sizes: Parallel, longest_row: int | None, unknown: list[str]
) -> list[Part]:
    """Estimate the temporary memory of a step at its peak.

    Tensor-parallel ranks divide layers and logits, sequence-parallel ranks divide tokens.
    """
    from areal_core.engine.logprobs import LOGITS_AT_A_TIME, TOKENS_PER_WEIGHT_GRADIENT

    size = SIZES[config.actor.dtype]
    gathered = shape.outside_layers + (GATHERED_LAYERS + 1) * shape.largest_layer
    parts = [
        Part(
            "working copy",
            size * gathered // sizes.tensor,
            f"{config.actor.dtype}: everything outside of layers, {GATHERED_LAYERS} layers, gradients of one"
            + f"; over {sizes.tensor}" * (sizes.tensor > 1),
        )
    ]
    tokens = tokens_of_micro_batch(config, sizes.data, longest_row)
    if tokens is None:
        unknown.append(
            "activations: neither actor.mb_spec.max_tokens_per_mb nor train_dataset.max_length is given, "
            "and the rows or the tokenizer are not local"
        )
    else:
        tokens = -(-tokens // sizes.context)
        divided = KEPT_IN_HEADS * shape.hidden + KEPT_INTERMEDIATE * shape.intermediate
        layer = (KEPT_HIDDEN - KEPT_IN_HEADS) * shape.hidden + divided // sizes.tensor
        recomputes = config.actor.gradient_checkpointing
        kept = shape.num_layers * shape.hidden + layer if recomputes else shape.num_layers * layer
        how = "one layer and the inputs of all" if recomputes else f"{shape.num_layers} layers"
        parts.append(Part("activations", tokens * kept * size, f"roughly, {tokens:,} tokens through {how}"))
    logits = LOGITS_AT_A_TIME["cpu" if config.device == "cpu" else "cuda"]
    vocab = shape.vocab // sizes.tensor
    block = TOKENS_PER_WEIGHT_GRADIENT
    if tokens is not None:
        logits, block = min(logits, tokens * vocab), min(block, tokens)
    chunk = 2 * FP32 * logits + block * vocab * size
    return [
        *parts,
        Part(
            "logits",
            chunk + FP32 * vocab * shape.hidden,
            "one chunk at a time, and the output layer's gradient",
        ),
    ]


def tokens_of_micro_batch(config: AnyConfig, num_ranks: int, longest_row: int | None) -> int | None:
    spec, rows = config.actor.mb_spec, config.train_dataset.batch_size // num_ranks
    if isinstance(config, PPOConfig):
        longest: int | None = longest_sequence(config, longest_row)
        rows = rows * config.gconfig.n_samples // config.actor.ppo_n_minibatches
    else:
        longest = longest_row
        rows *= 2 if isinstance(config, RWConfig | DPOConfig) else 1  # a pair is two sequences
    limits = [] if longest is None else [longest * max(1, rows // (spec.n_mbs or 1))]
    if spec.max_tokens_per_mb:
        limits.append(spec.max_tokens_per_mb)
    return min(limits, default=None)


def engine_parts(
    config: PPOConfig, allocation: Allocation, shape: Shape, longest_row: int | None
) -> list[Part]:
    """Estimate weights and cache of the engine, on a rank if embedded, else per server device."""
    if allocation.rollout is None:
        return []
    num_engines, tensor = allocation.rollout.data, allocation.rollout.tensor
    is_embedded = allocation.rollout_backend == "embedded"
    dtype = config.actor.dtype if is_embedded else server_options(config, allocation).dtype
    size = cached = SIZES[dtype]
    if allocation.rollout_backend == "sglang" and "fp8" in config.sglang.kv_cache_dtype:
        cached = 1
    weights = shape.num_parameters * size // tensor
    split = f" over {tensor} devices" if tensor > 1 else ""
    return [
        Part("engine's weights", weights, f"{dtype}{split}"),
        cache_part(config, shape, cached, tensor, num_engines, longest_sequence(config, longest_row)),
    ]


def cache_part(
    config: PPOConfig, shape: Shape, size: int, tensor: int, num_engines: int, longest: int
) -> Part:
    """Estimate the key-value cache of one engine if every sequence in flight has maximum length."""
    prompts = config.rollout.max_concurrent_rollouts or config.train_dataset.batch_size
    sequences = -(-prompts * config.gconfig.n_samples // num_engines)
    tokens = sequences * longest
    per_token = shape.cache_per_token * size // tensor
    how = f"at most, {sequences:,} sequences of {longest:,} tokens at {per_token:,} bytes a token"
    return Part("key-value cache", tokens * per_token, how)


def longest_sequence(config: PPOConfig, longest_prompt: int | None) -> int:
    if longest_prompt is None:
        return config.gconfig.max_tokens
    return min(config.gconfig.max_tokens, longest_prompt + config.gconfig.max_new_tokens)


def read_shape(model: Model, sizes: Parallel = Parallel()) -> Shape | None:
    """Read the sizes of a model from its folder or the hub's cache; None without a known config.

    Raises:
        RanksError, ModelError: its heads or layers cannot be divided among the ranks of a group, or
            it has no module that matches the target modules of an adapter.
    """
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    from areal_core.engine.lora import count_adapters
    from areal_core.engine.model import is_vision
    from areal_core.engine.sequence_parallel import check_heads
    from areal_core.engine.tensor_parallel import check_tensor_parallel, placement_of
    from areal_core.engine.vision_models import tower_parameters

    head: Any = AutoModelForSequenceClassification if model.has_scores else AutoModelForCausalLM
    try:
        config = AutoConfig.from_pretrained(model.options.path, local_files_only=True)
        if is_vision(config) and not model.has_scores:
            head = AutoModelForImageTextToText
        if model.has_scores:
            config.num_labels = 1
        with torch.device("meta"):
            built = head.from_config(config)
    except Exception:  # no such folder, or a model that Transformers does not know
        return None
    if sizes.tensor > 1:
        check_tensor_parallel(built.config, sizes.tensor)
    check_heads(built.config, sizes.context, sizes.tensor)
    policy = model.options.fsdp.wrap_policy
    named = policy.transformer_layer_cls_to_wrap if policy else None
    classes = tuple(named or built._no_split_modules or ())
    layers = [module for module in built.modules() if type(module).__name__ in classes]
    layer_sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    total = sum(parameter.numel() for parameter in built.parameters())
    undivided = sum(
        parameter.numel()
        for name, part in built.named_modules()
        for parameter in part.parameters(recurse=False)
        if placement_of(name.rpartition(".")[2], parameter.ndim).is_replicate()
    )
    shape = parse_shape(config.get_text_config().to_dict(), total, undivided, layer_sizes)
    shape = replace(shape, tower=sum(parameter.numel() for parameter in tower_parameters(built)))
    options = model.options
    if not (model.trains and options.use_lora):
        return shape
    return replace(shape, adapter=count_adapters(built, options.lora_rank, options.target_modules))


def parse_shape(facts: dict[str, Any], num_parameters: int, undivided: int, layers: list[int]) -> Shape:
    """Parse sizes from `config.json`. A mixture of experts uses a few experts per token."""
    heads = facts["num_attention_heads"]
    head_dim = facts.get("head_dim") or facts["hidden_size"] // heads
    kv_heads = facts.get("num_key_value_heads") or heads
    experts = facts.get("num_experts_per_tok")
    width = experts * facts["moe_intermediate_size"] if experts and "moe_intermediate_size" in facts else None
    return Shape(
        num_parameters=num_parameters,
        undivided=undivided,
        outside_layers=num_parameters - sum(layers),
        largest_layer=max(layers, default=0),
        num_layers=facts["num_hidden_layers"],
        hidden=facts["hidden_size"],
        intermediate=width or facts["intermediate_size"],
        vocab=facts["vocab_size"],
        cache_per_token=2 * facts["num_hidden_layers"] * kv_heads * head_dim,
    )
