"""The stages of one step in the order in which they run, and what happens between steps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from areal_core.config import (
    DPOConfig,
    PPOActorConfig,
    PPOConfig,
    PPOCriticConfig,
    RWConfig,
    TrainEngineConfig,
)
from areal_core.config.allocation import Allocation, Parallel
from areal_core.config.experiment import TimerConfig
from areal_core.config.servers import is_base_of, serves_adapters
from areal_core.engine.memory_plan import AnyConfig
from areal_core.paths import record_folder, run_folder
from areal_core.servers.client import adapter_name


@dataclass(frozen=True)
class Stage:
    """One stage and a description of what it does."""

    name: str
    does: str


def plan_step(config: AnyConfig, allocation: Allocation) -> Iterator[Stage]:
    """Yield the stages of a step; the allocation must have a training part."""
    if isinstance(config, PPOConfig):
        yield from plan_rollout(config, allocation)
        yield from plan_scores(config)
    if isinstance(config, DPOConfig):
        yield Stage("reference", f"one forward pass of {reference_of(config)}")
    yield plan_update(config, config.actor, allocation)
    if isinstance(config, PPOConfig) and config.critic is not None:
        yield replace(plan_update(config, config.critic, allocation), name="value update")
    if isinstance(config, PPOConfig) and allocation.rollout is not None:
        yield plan_weight_update(config, allocation)


def plan_rollout(config: PPOConfig, allocation: Allocation) -> Iterator[Stage]:
    num_prompts, num_samples = config.train_dataset.batch_size, config.gconfig.n_samples
    batch = f"{num_prompts} prompts x {num_samples} samples = {num_prompts * num_samples:,} sequences"
    if config.debug.replay_rollout_data:
        yield Stage("batch", f"replayed from {record_folder(config)}")
        return
    if allocation.rollout is None:
        yield Stage(
            "batch", "the allocation has no engine: the script must pass a source of batches to the trainer"
        )
        return
    at_once = config.rollout.max_concurrent_rollouts or num_prompts
    tokens = (
        f"at most {config.gconfig.max_new_tokens} new tokens each, temperature {config.gconfig.temperature}"
    )
    yield Stage("rollout", f"{batch}, {tokens}; {at_once} prompts at once")
    behind = config.rollout.max_head_offpolicyness
    ahead = f"samples up to {behind} versions old; generation runs during training"
    yield Stage(
        "staleness", ahead if behind else "none: each sample comes from the version that trains on it"
    )
    if config.actor.dynamic_sampling:
        yield Stage("filter", "groups whose rewards are all equal are dropped and resampled")


def plan_scores(config: PPOConfig) -> Iterator[Stage]:
    actor = config.actor
    if config.reward_model is not None and not config.debug.replay_rollout_data:
        weight = config.reward_model.weight
        yield Stage(
            "scores",
            f"one forward pass of {config.reward_model.path}; score x {weight} is added to the reward",
        )
    if config.critic is not None:
        yield Stage("values", f"one forward pass of {config.critic.path}")
    if config.ref is not None and actor.uses_reference():
        weights = f"KL weight {actor.kl_ctl} in the reward, {actor.kl_loss_coef} in the loss"
        yield Stage("reference", f"one forward pass of {reference_of(config)}; {weights}")
    if config.teacher is not None:
        weights = f"policy loss x {config.teacher.rl_loss_weight} + distillation x {config.teacher.distill_loss_weight}"
        yield Stage("teacher", f"one forward pass of {config.teacher.path}; {weights}")
    if actor.should_compute_prox_logp():
        yield Stage(
            "proximal", "one forward pass of the actor, for the logprobs that the ratio is clipped around"
        )
    norms = {"rewards": actor.reward_norm, "advantages": actor.adv_norm}
    described = [
        f"{name}: mean of {norm.mean_level}, standard deviation of {norm.std_level}"
        for name, norm in norms.items()
        if norm is not None
    ]
    yield Stage("advantages", "; ".join(described) or "not normalised")


def plan_update(config: AnyConfig, model: TrainEngineConfig, allocation: Allocation) -> Stage:
    assert allocation.train is not None
    limit, num_ranks = model.mb_spec.max_tokens_per_mb, allocation.train.data
    rows, minibatches = config.train_dataset.batch_size // num_ranks, 1
    if isinstance(config, PPOConfig):
        rows *= config.gconfig.n_samples
    if isinstance(model, PPOActorConfig | PPOCriticConfig):
        minibatches = model.ppo_n_minibatches
    micro = f"micro-batches of at most {limit:,} tokens" if limit else f"{model.mb_spec.n_mbs} micro-batches"
    checkpointing = ", activations recomputed" if model.gradient_checkpointing else ""
    compiled = ", layers compiled" if model.fsdp.compile else ""
    unit = "pairs" if isinstance(config, RWConfig | DPOConfig) else "sequences"
    times = "1 optimizer step" if minibatches == 1 else f"{minibatches} optimizer steps"
    times += f" of an adapter of rank {model.lora_rank}" * model.use_lora
    return Stage(
        "update",
        f"{times} over {rows:,} {unit} {row_owner(allocation.train)}, in {micro}{checkpointing}{compiled}; "
        f"attention is {describe_attention(config.device, model)}",
    )


def describe_attention(device: str, model: TrainEngineConfig) -> str:
    """Describe the kernel that `attn_impl` selects, on a GPU unless the config names a CPU."""
    import torch

    from areal_core.engine.attention import choose_attention

    kind = "cpu" if device == "cpu" else "cuda"
    return choose_attention(model.attn_impl, kind, getattr(torch, model.dtype)).reason


def row_owner(sizes: Parallel) -> str:
    """Describe which ranks share rows: one rank, or a group and how it divides them."""
    if sizes.context * sizes.tensor == 1:
        return "per rank"
    shares = [f"their tokens {sizes.context} ways"] * (sizes.context > 1)
    shares += [f"the layers {sizes.tensor} ways"] * (sizes.tensor > 1)
    return f"per group of {sizes.context * sizes.tensor} ranks, which divide {' and '.join(shares)}"


def reference_of(config: PPOConfig | DPOConfig) -> str:
    is_base = is_base_of(config.ref, config.actor)
    return "the actor with its adapter off" if is_base else (config.ref or config.actor).path


def plan_weight_update(config: PPOConfig, allocation: Allocation) -> Stage:
    if allocation.rollout_backend == "embedded":
        assert allocation.train is not None
        is_alone = allocation.train.context * allocation.train.tensor == 1
        whose = "each rank's own replica" if is_alone else "the replica of rank 0 of each group"
        return Stage("weight sync", f"weights are copied into {whose}")
    assert allocation.rollout is not None
    ways = {"xccl": "broadcast to", "disk": "written to disk and read by"}
    check = config.rollout.verify_weights_every
    servers = f"{allocation.rollout.data} server{'s' * (allocation.rollout.data != 1)}"
    when = f"after the first and every {check} weight syncs"
    if serves_adapters(config):
        checked = f"; the base model is compared with its files {when}" if check else ""
        name = adapter_name(config.gconfig.lora_name, "N")
        return Stage(
            "weight sync", f"the adapter is written to disk and read by {servers} as {name}{checked}"
        )
    checked = f"; compared with the trainer's {when}" if check else ""
    return Stage("weight sync", f"weights are {ways[config.actor.weight_update_mode]} {servers}{checked}")


def plan_upkeep(config: AnyConfig, describe_period: Callable[[TimerConfig], str]) -> Iterator[Stage]:
    """Yield checkpoints, evaluation, recovery, records and loggers."""
    checkpoints = run_folder(config, "checkpoints")
    yield Stage("save", plan_saving(config, describe_period(config.saver), checkpoints / "default"))
    recover, mode = describe_period(config.recover), config.recover.mode
    off = mode in ("disabled", "off") or not recover
    yield Stage(
        "recover",
        f"no: recover.mode is {mode}" if off else f"{mode}, {recover}; into {checkpoints / 'recover'}",
    )
    yield Stage("evaluate", plan_evaluation(config, describe_period))
    if config.debug.dump_rollout_data:
        every = config.debug.dump_every
        steps = f"every {every} steps" if every > 1 else "every step"
        yield Stage("record", f"{steps}, scope {config.debug.dump_scope}, into {record_folder(config)}")
    yield Stage("log", ", ".join(loggers(config)))


def plan_saving(config: AnyConfig, period: str, folder: Path) -> str:
    when = [*([period] if period else []), *(["after the last step"] if config.saver.save_last else [])]
    if not when:
        return "no checkpoint is exported: saver.save_last is false and saver.freq_* are empty"
    is_critic = isinstance(config, PPOConfig) and config.critic is not None
    return f"{'; '.join(when)}; into {folder}{'; the critic next to it' if is_critic else ''}"


def plan_evaluation(config: AnyConfig, describe_period: Callable[[TimerConfig], str]) -> str:
    period = describe_period(config.evaluator)
    when = [
        *(["before the first step"] if config.evaluator.eval_before_train else []),
        *([period] if period else []),
    ]
    if not when:
        return "never: evaluator.freq_* are empty"
    if config.valid_dataset is None:
        return f"{'; '.join(when)}; valid_dataset is empty, so the script must pass the rows"
    return f"{'; '.join(when)}; on {config.valid_dataset.path}"


def loggers(config: AnyConfig) -> Iterator[str]:
    """Yield the destinations of statistics."""
    options = config.stats_logger
    yield "stats.jsonl"
    if options.tensorboard.path:
        yield f"TensorBoard in {options.tensorboard.path}"
    if options.wandb.mode != "disabled":
        yield f"Weights & Biases ({options.wandb.mode})"
    if options.trackio.mode != "disabled":
        yield f"Trackio ({options.trackio.mode})"
