"""Memory that a rank and a server would need, from the model's `config.json`: shapes on the meta device, no weights.

States are exact (parameters divided by ranks); activations and caches are rough and say how they are reckoned.
"""

from dataclasses import dataclass
from typing import Any

from areal_core.allocation import Allocation
from areal_core.config import PPOConfig, TrainEngineConfig
from areal_debug.dry_run_step import AnyConfig

FP32 = 4
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}
ADAM_STATES = {"adam": 2, "sgd": 0, "adam_bf16": 2}
# Elements that the backward of one layer keeps for a token, in hidden and intermediate widths, of a layer as Llama has it:
# two norms in float32 with their outputs, queries twice, keys and values, attention, residual; gate, up, activation, product.
KEPT_HIDDEN, KEPT_INTERMEDIATE = 12, 4
LAYERS_AT_HAND = 2  # FSDP2 gathers the next layer while one computes


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, in elements."""

    num_parameters: int
    outside_layers: int
    largest_layer: int
    num_layers: int
    hidden: int
    intermediate: int
    vocab: int
    cache_per_token: int


@dataclass(frozen=True)
class Part:
    """One item of a rank's or a server's memory."""

    name: str
    size_bytes: int
    how: str


@dataclass(frozen=True)
class Memory:
    """Parts of one rank, and of one device of a server; where a part is missing, `unknown` says why."""

    num_parameters: int | None
    rank: tuple[Part, ...]
    server: tuple[Part, ...]
    unknown: tuple[str, ...]


def estimate_memory(config: AnyConfig, allocation: Allocation) -> Memory:
    """What fits or does not, before anything is started."""
    shape = read_shape(config.actor)
    if shape is None:
        return Memory(None, (), (), (f"{config.actor.path} has no config.json here",))
    rank: list[Part] = []
    server: list[Part] = []
    unknown: list[str] = []
    if allocation.train is not None:
        num_ranks = allocation.train.world_size
        for name, options, trains in models_of(config):
            other = shape if options.path == config.actor.path else read_shape(options)
            if other is None:
                unknown.append(f"{name}: {options.path} has no config.json here")
                continue
            rank += state_parts(name, other, options, num_ranks, trains)
        rank += working_parts(config, shape, unknown)
        if allocation.rollout_backend == "embedded" and isinstance(config, PPOConfig):
            size = SIZES[config.actor.dtype]
            rank.append(Part("replica", shape.num_parameters * size, "the embedded engine's own weights"))
            rank.append(cache_part(config, shape, size, 1, num_ranks))
    replays = config.debug.replay_rollout_data
    if allocation.rollout_backend == "sglang" and isinstance(config, PPOConfig) and not replays:
        assert allocation.rollout is not None
        tensor, size = allocation.rollout.tensor, SIZES[config.sglang.dtype]
        server.append(
            Part(
                "weights",
                shape.num_parameters * size // tensor,
                f"{config.sglang.dtype} over {tensor} devices",
            )
        )
        cached = 1 if "fp8" in config.sglang.kv_cache_dtype else size
        server.append(cache_part(config, shape, cached, tensor, allocation.rollout.data))
    return Memory(shape.num_parameters, tuple(rank), tuple(server), tuple(unknown))


def models_of(config: AnyConfig) -> list[tuple[str, TrainEngineConfig, bool]]:
    """Every model of a rank: its name, its options, and whether it is trained."""
    models: list[tuple[str, TrainEngineConfig, bool]] = [("actor", config.actor, True)]
    if isinstance(config, PPOConfig):
        if config.critic is not None:
            models.append(("critic", config.critic, True))
        if config.ref is not None and config.actor.kl_ctl > 0:
            models.append(("reference", config.ref, False))
        if config.teacher is not None:
            models.append(("teacher", config.teacher, False))
    return models


def state_parts(
    name: str, shape: Shape, options: TrainEngineConfig, num_ranks: int, trains: bool
) -> list[Part]:
    """What lives as long as the run, in shards of equal size."""
    shard = -(-shape.num_parameters // num_ranks)
    over = f"{shape.num_parameters:,} parameters over {num_ranks} ranks"
    parts = [Part(f"{name}: masters", FP32 * shard, f"float32, {over}")]
    if trains:
        kind = options.optimizer.type if options.optimizer is not None else "adam"
        states = ADAM_STATES[kind]
        parts.append(Part(f"{name}: optimiser", states * FP32 * shard, f"{states} float32 states of {kind}"))
        parts.append(Part(f"{name}: gradients", FP32 * shard, "float32, sharded"))
    return parts


def working_parts(config: AnyConfig, shape: Shape, unknown: list[str]) -> list[Part]:
    """What comes and goes within a step, at its peak."""
    from areal_core.engine.logprobs import LOGITS_AT_A_TIME, TOKENS_PER_WEIGHT_GRADIENT

    size = SIZES[config.actor.dtype]
    gathered = shape.outside_layers + (LAYERS_AT_HAND + 1) * shape.largest_layer
    parts = [
        Part(
            "working copy",
            size * gathered,
            f"{config.actor.dtype}: all outside of layers, {LAYERS_AT_HAND} layers, gradients of one",
        )
    ]
    tokens = tokens_of_micro_batch(config)
    if tokens is None:
        unknown.append(
            "activations: neither actor.mb_spec.max_tokens_per_mb nor train_dataset.max_length is given"
        )
    else:
        layer = KEPT_HIDDEN * shape.hidden + KEPT_INTERMEDIATE * shape.intermediate
        recomputes = config.actor.gradient_checkpointing
        kept = shape.num_layers * shape.hidden + layer if recomputes else shape.num_layers * layer
        how = "one layer and the inputs of all" if recomputes else f"{shape.num_layers} layers"
        parts.append(Part("activations", tokens * kept * size, f"roughly, {tokens:,} tokens through {how}"))
    logits = LOGITS_AT_A_TIME["cpu" if config.device == "cpu" else "cuda"]
    chunk = 2 * FP32 * logits + TOKENS_PER_WEIGHT_GRADIENT * shape.vocab * size
    return [
        *parts,
        Part(
            "logits",
            chunk + FP32 * shape.vocab * shape.hidden,
            "a chunk at a time, and the output layer's gradient",
        ),
    ]


def tokens_of_micro_batch(config: AnyConfig) -> int | None:
    """Most tokens that go through the model at a time; None if nothing bounds them."""
    spec, data = config.actor.mb_spec, config.train_dataset
    if spec.max_tokens_per_mb:
        return spec.max_tokens_per_mb
    if not isinstance(config, PPOConfig):
        return data.max_length and data.max_length * data.batch_size // (spec.n_mbs or 1)
    sequences = data.batch_size * config.gconfig.n_samples // config.actor.ppo_n_minibatches
    return longest_sequence(config) * max(1, sequences // (spec.n_mbs or 1))


def longest_sequence(config: PPOConfig) -> int:
    """Most tokens of prompt and completion."""
    if config.train_dataset.max_length is None:
        return config.gconfig.max_tokens
    return min(config.gconfig.max_tokens, config.train_dataset.max_length + config.gconfig.max_new_tokens)


def cache_part(config: PPOConfig, shape: Shape, size: int, tensor: int, num_engines: int) -> Part:
    """Keys and values of everything that one engine may have in flight, were each sequence as long as it may get."""
    prompts = config.rollout.max_concurrent_rollouts or config.train_dataset.batch_size
    sequences = -(-prompts * config.gconfig.n_samples // num_engines)
    tokens = sequences * longest_sequence(config)
    per_token = shape.cache_per_token * size // tensor
    how = f"at most, {sequences:,} sequences of {longest_sequence(config):,} tokens at {per_token:,} bytes a token"
    return Part("key-value cache", tokens * per_token, how)


def read_shape(options: TrainEngineConfig) -> Shape | None:
    """Sizes of the model at `options.path`, from a folder or what the hub's cache holds; None where there is no config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(options.path, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except (OSError, ValueError):  # no such folder, or a model that Transformers does not know
        return None
    policy = options.fsdp.wrap_policy
    named = policy.transformer_layer_cls_to_wrap if policy else None
    classes = tuple(named or model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in classes]
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    total = sum(parameter.numel() for parameter in model.parameters())
    return parse_shape(config.get_text_config().to_dict(), total, sizes)


def parse_shape(facts: dict[str, Any], num_parameters: int, layers: list[int]) -> Shape:
    """Sizes from `config.json`. A mixture of experts sends a token through a few of them only."""
    heads = facts["num_attention_heads"]
    head_dim = facts.get("head_dim") or facts["hidden_size"] // heads
    kv_heads = facts.get("num_key_value_heads") or heads
    experts = facts.get("num_experts_per_tok")
    width = experts * facts["moe_intermediate_size"] if experts and "moe_intermediate_size" in facts else None
    return Shape(
        num_parameters=num_parameters,
        outside_layers=num_parameters - sum(layers),
        largest_layer=max(layers, default=0),
        num_layers=facts["num_hidden_layers"],
        hidden=facts["hidden_size"],
        intermediate=width or facts["intermediate_size"],
        vocab=facts["vocab_size"],
        cache_per_token=2 * facts["num_hidden_layers"] * kv_heads * head_dim,
    )
