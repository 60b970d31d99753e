"""Options that must agree, as rows of a table: a broken one is a sentence with the values."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any

from areal_core.config.experiment import BaseExperimentConfig, DPOConfig, PPOConfig, RWConfig
from areal_core.config.generation import GenerationHyperparameters
from areal_core.config.option import Role
from areal_core.config.presets import shown
from areal_core.config.servers import serves_adapters
from areal_core.config.services import REWARD_SERVICE
from areal_core.config.train_engine import NormConfig, TrainEngineConfig
from areal_core.config.vision_checks import model_facts

ALL_SPARSE_IN_SGLANG = ("qwen2_moe", "qwen3_moe")  # the families whose `mlp_only_layers` it ignores


@dataclass(frozen=True)
class Rule:
    """Options that must agree.

    Attributes:
        options: the options that a sentence shows with their values, in order; `*` is the name of
            a model, `allocation` the sizes of the run.
        broken: whether they disagree, from the config and the model's section.
        advice: the rest of the sentence; `{a}` is the allocation.
        models: sections that the rule is about, where they are given; all models for `*`.
        config: the methods that it is for.
        role: "rollout" for rules that hold without a trainer, too.
    """

    options: str
    broken: Callable[[Any, Any], object]
    advice: str
    models: tuple[str, ...] = ("",)
    config: type | UnionType = BaseExperimentConfig
    role: Role = "train"


ALL = ("actor", "ref", "critic", "teacher", "reward_model")
EXPERTS = "rollout.return_routed_experts"
PAIRS = DPOConfig | RWConfig
SAPO = {
    "use_decoupled_loss": False,
    "importance_sampling_level": "token",
    "eps_clip_higher": None,
    "c_clip": None,
}

CISPO: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("use_sapo_loss", lambda value: not value, "false"),
    ("importance_sampling_level", lambda value: value == "token", "token"),
    ("c_clip", lambda value: value is None, "null"),
    ("eps_clip_higher", lambda value: value is not None and value > 0, "a number above 0, such as 4.0"),
)


def rows_per_rank(c: PPOConfig) -> int:
    num_rows = c.train_dataset.batch_size * c.gconfig.n_samples
    return num_rows // (c.allocation.train.data if c.allocation.train is not None else 1)


def is_grouped(norm: NormConfig | None) -> bool:
    return norm is not None and "group" in (norm.mean_level, norm.std_level)


def needs_length(c: PPOConfig) -> bool:
    return c.actor.overlong_reward_penalty or c.actor.loss_aggregation == "seq-mean-token-sum-norm"


def is_sparse_in_sglang(c: PPOConfig) -> bool:
    """Whether SGLang would give experts to dense layers of the model."""
    facts = model_facts(c.actor.path)
    is_known = c.allocation.rollout_backend == "sglang" and facts.get("model_type") in ALL_SPARSE_IN_SGLANG
    return is_known and bool(facts.get("mlp_only_layers") or facts.get("decoder_sparse_step", 1) != 1)


def lacks_tensor_one(c: BaseExperimentConfig) -> bool:
    return c.allocation.train is not None and c.allocation.train.tensor > 1


def sums_plainly(c: BaseExperimentConfig, m: TrainEngineConfig) -> bool:
    """Whether ranks share rows and float32 shards of weights, and nothing else."""
    train = c.allocation.train
    is_plain = m.fsdp.shard_size is None and m.grad_reduce_dtype == "float32"
    return is_plain and (train is None or train.tensor * train.context == 1)


def misfits_shards(c: BaseExperimentConfig, m: TrainEngineConfig) -> bool:
    size, train = m.fsdp.shard_size, c.allocation.train
    return (
        size is not None and train is not None and bool(train.data * train.context % size or train.tensor > 1)
    )


def of_rejection(broken: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
    return lambda c, m: (r := c.actor.rejection_sampling) is not None and broken(c, r)


# fmt: off
RULES = (
    Rule("actor.path", lambda c, m: not c.actor.path, "give a model folder"),
    Rule("actor.optimizer", lambda c, m: c.actor.optimizer is None, "give at least actor.optimizer.lr"),
    Rule("recover.mode recover.freq_epochs recover.freq_steps recover.freq_secs",
         lambda c, m: c.recover.mode in ("auto", "on", "fault")
             and (not any((c.recover.freq_epochs, c.recover.freq_steps, c.recover.freq_secs))),
         "give one of the periods, or there is no checkpoint to continue from"),
    Rule("debug.dump_rollout_data debug.replay_rollout_data",
         lambda c, m: c.debug.dump_rollout_data and c.debug.replay_rollout_data, "a run records or replays, not both"),
    Rule("debug.replay_rollout_data debug.path", lambda c, m: c.debug.replay_rollout_data and (not c.debug.path),
         "give the folder of the record"),
    Rule("debug.dump_steps debug.dump_every", lambda c, m: c.debug.dump_steps is not None and c.debug.dump_every != 1,
         "give one of them"),
    Rule("debug.reduction allocation *.fsdp.shard_size *.grad_reduce_dtype",
         lambda c, m: c.debug.reduction == "fixed" and not sums_plainly(c, m),
         "sums in rank order are for data parallelism alone: use t1 and c1, no shard_size, and float32", ("actor", "critic")),
    Rule("debug.reduction rollout.return_routed_experts",
         lambda c, m: c.debug.reduction == "fixed" and c.rollout.return_routed_experts,
         "experts are not replayed by virtual ranks: set one of them to its default", config=PPOConfig),
    Rule("debug.verify_on allocation",
         lambda c, m: c.debug.verify_on == "neighbour" and c.allocation.train is not None and c.allocation.train.data < 2,
         "there is no other rank with rows of its own: use debug.verify_on=self, or two data-parallel ranks"),
    Rule("train_dataset.batch_size allocation",
         lambda c, m: c.allocation.train is not None and c.train_dataset.batch_size % c.allocation.train.data,
         "the first must be a multiple of the data-parallel size d of the second"),
    Rule("*.is_critic",
         lambda c, m: m.is_critic and m is not (c.actor if isinstance(c, RWConfig) else getattr(c, "critic", None))
             and (m is not getattr(c, "reward_model", None)),
         "the section configures a language model: set it to false", ALL),
    Rule("*.mb_spec.granularity", lambda c, m: m.mb_spec.granularity not in ((1, 2) if isinstance(c, PAIRS) else (1,)),
         "DPO and reward models keep 2 sequences together, others 1: use 1 for both", ALL),
    Rule("*.use_liger device", lambda c, m: m.use_liger and c.device == "cpu",
         "Liger's kernels need a GPU: set it to false", ALL),
    Rule("*.dtype", lambda c, m: m.dtype == "float16",
         "in which gradients of long batches become 0, and losses are not scaled: use bfloat16 or float32",
         ("actor", "critic")),
    Rule("*.fsdp.shard_size allocation", misfits_shards, "the first must divide d x c, and needs t1", ALL),
    Rule("*.fsdp.compile allocation", lambda c, m: m.fsdp.compile and lacks_tensor_one(c),
         "tensor-parallel layers are not compiled: set the first to false, or use t1", ALL),
    Rule("*.lora_rank *.lora_alpha", lambda c, m: m.use_lora and (m.lora_rank < 1 or m.lora_alpha <= 0),
         "expected 1 or more, and above 0", ("actor", "critic")),
    Rule("*.use_lora allocation", lambda c, m: m.use_lora and lacks_tensor_one(c),
         "adapters are not sharded over tensor-parallel ranks: use t1", ("actor", "critic")),
    Rule("*.use_lora", lambda c, m: m.use_lora, "the model is not trained; set it to false",
         ("ref", "teacher", "reward_model")),
    Rule("actor.mb_spec.max_tokens_per_mb train_dataset.max_length",
         lambda c, m: 0 < (c.actor.mb_spec.max_tokens_per_mb or 0) < 2 * (c.train_dataset.max_length or 0),
         "a pair stays in one micro-batch: the first must be at least twice the second", config=PAIRS),
    Rule("ref.path", lambda c, m: not m.path, "give a model folder, or no ref section for the initial policy", ("ref",),
         DPOConfig),
    Rule("ref.temperature actor.temperature", lambda c, m: m.temperature != c.actor.temperature, "they must be equal",
         ("ref",), DPOConfig),
    Rule("actor.init_from_scratch", lambda c, m: c.actor.init_from_scratch,
         "the reference could not have the same weights: give a trained model", config=DPOConfig),
    Rule("rollout.tokenizer_path tokenizer_path",
         lambda c, m: c.rollout.tokenizer_path not in ("", c.tokenizer_path or c.actor.path),
         "they must be equal, where an empty one is actor.path", config=PPOConfig, role="rollout"),
    Rule("gconfig.min_new_tokens gconfig.max_new_tokens",
         lambda c, m: c.gconfig.min_new_tokens > c.gconfig.max_new_tokens, "the first is at most the second",
         config=PPOConfig, role="rollout"),
    Rule("async_training rollout.max_head_offpolicyness",
         lambda c, m: not c.async_training and c.rollout.max_head_offpolicyness > 0,
         "synchronous training uses samples of its own version only: set the second to 0", config=PPOConfig),
    Rule("actor.dynamic_sampling gconfig.n_samples", lambda c, m: c.actor.dynamic_sampling and c.gconfig.n_samples == 1,
         "the rewards of a group of one never differ, so every prompt would be dropped: use 2 or more",
         config=PPOConfig),
    Rule("consistency.every_k_steps actor.use_decoupled_loss actor.recompute_logprob",
         lambda c, m: c.consistency.every_k_steps > 0 and (not c.actor.should_compute_prox_logp()),
         "without the trainer's own logprobs nothing can be compared: with the decoupled loss set "
         "actor.prox_logp_method to metrics, else actor.recompute_logprob to true", config=PPOConfig),
    Rule("rollout.consumer_batch_size train_dataset.batch_size",
         lambda c, m: c.rollout.consumer_batch_size != c.train_dataset.batch_size, "they must be equal",
         config=PPOConfig),
    Rule("rollout.queue_size train_dataset.batch_size",
         lambda c, m: c.rollout.queue_size is not None and c.rollout.queue_size < c.train_dataset.batch_size,
         "the queue must hold a batch", config=PPOConfig),
    *(
        Rule(f"actor.{norm}.group_size gconfig.n_samples",
             lambda c, m, norm=norm: is_grouped(n := getattr(c.actor, norm)) and n.group_size != c.gconfig.n_samples,  # type: ignore[misc]
             "they must be equal", config=PPOConfig)
        for norm in ("reward_norm", "adv_norm")
    ),
    *(
        Rule(f"actor.{norm}.group_size gconfig.n_samples",
             lambda c, m, norm=norm: is_grouped(n := getattr(c.actor, norm))  # type: ignore[misc]
                 and n.group_size == c.gconfig.n_samples == 1 and (c.rollout.agent.mode != "online"),
             "a group of one has nothing to compare: use 2 or more", config=PPOConfig)
        for norm in ("reward_norm", "adv_norm")
    ),
    Rule("actor.group_size gconfig.n_samples", lambda c, m: c.actor.group_size not in (1, c.gconfig.n_samples),
         "they must be equal", config=PPOConfig),
    Rule("actor.temperature gconfig.temperature",
         lambda c, m: c.actor.temperature != c.gconfig.temperature or c.gconfig.temperature <= 0,
         "they must be equal and above 0", config=PPOConfig),
    *(
        Rule(f"actor.{name} ref", lambda c, m, name=name: getattr(c.actor, name) > 0 and c.ref is None,  # type: ignore[misc]
             f"set actor.{name}=0 or give a ref section", config=PPOConfig)
        for name in ("kl_ctl", "kl_loss_coef")
    ),
    Rule("ref.temperature actor.temperature",
         lambda c, m: c.actor.uses_reference() and m.temperature != c.actor.temperature,
         "the KL penalty compares the two: they must be equal", ("ref",), PPOConfig),
    Rule("gconfig.top_p gconfig.top_k",
         lambda c, m: c.allocation.rollout_backend == "vllm"
             and (c.gconfig.top_p < 1 or c.gconfig.top_k < GenerationHyperparameters.top_k),
         "vLLM's log-probs are normalised over the tokens that remain, the trainer's over all: set them to 1 and "
         f"{GenerationHyperparameters.top_k}, or use sglang", config=PPOConfig),
    Rule("actor.path", lambda c, m: is_sparse_in_sglang(c),
         "its config has layers without experts (mlp_only_layers, decoder_sparse_step); SGLang 0.5.23 gives every "
         "layer experts, and would sample with weights that no file has: use embedded|fsdp or vllm in allocation_mode",
         config=PPOConfig),
    Rule(f"{EXPERTS} allocation",
         lambda c, m: c.rollout.return_routed_experts and c.allocation.rollout_backend == "vllm",
         "the servers are vLLM's, which are not asked for experts: use sglang, or set it to false", config=PPOConfig),
    Rule(f"rollout.return_routed_weights {EXPERTS}",
         lambda c, m: c.rollout.return_routed_weights and not c.rollout.return_routed_experts,
         "weights are of experts that are replayed: set the second to true", config=PPOConfig),
    Rule("rollout.return_routed_weights allocation",
         lambda c, m: c.rollout.return_routed_weights and c.allocation.rollout_backend in ("sglang", "vllm"),
         "these servers report no weights of experts: use embedded|fsdp, or set the first to false", config=PPOConfig),
    Rule(f"{EXPERTS} actor.fsdp.compile", lambda c, m: c.rollout.return_routed_experts and c.actor.fsdp.compile,
         "compiled layers cannot replay experts: set one to false", config=PPOConfig),
    Rule(f"{EXPERTS} actor.enable_tree_training",
         lambda c, m: c.rollout.return_routed_experts and c.actor.enable_tree_training,
         "rows that share tokens may have other experts: set one to false", config=PPOConfig),
    Rule(f"{EXPERTS} actor.attn_impl",
         lambda c, m: c.rollout.return_routed_experts and c.actor.attn_impl == "batch_invariant",
         "the batch-invariant engine keeps no experts: use attn_impl=sdpa", config=PPOConfig),
    Rule("actor.enable_tree_training actor.attn_impl",
         lambda c, m: c.actor.enable_tree_training and c.actor.attn_impl == "batch_invariant",
         "the bits of trees are not those of sampled rows: set the first to false, or use attn_impl=sdpa",
         config=PPOConfig),
    Rule("actor.overlong_reward_penalty actor.overlong_tokens actor.overlong_penalty_factor",
         lambda c, m: c.actor.overlong_reward_penalty and None in (c.actor.overlong_tokens, c.actor.overlong_penalty_factor),
         "both must be given", config=PPOConfig),
    Rule("actor.overlong_tokens gconfig.max_new_tokens",
         lambda c, m: c.actor.overlong_reward_penalty and c.actor.overlong_penalty_factor is not None
             and (not 0 < (c.actor.overlong_tokens or 1) <= c.gconfig.max_new_tokens), "expected 1 to the second",
         config=PPOConfig),
    Rule("actor.max_new_tokens gconfig.max_new_tokens",
         lambda c, m: needs_length(c) and c.actor.max_new_tokens != c.gconfig.max_new_tokens, "they must be equal",
         config=PPOConfig),
    Rule("actor.behav_imp_weight_cap actor.rejection_sampling",
         of_rejection(lambda c, r: c.actor.behav_imp_weight_cap is not None), "keep the second, whose upper is the cap",
         config=PPOConfig),
    Rule("actor.rejection_sampling.action actor.rejection_sampling.metric",
         of_rejection(lambda c, r: r.action == "clamp" and r.metric != "ratio"), "only a ratio can be clamped",
         config=PPOConfig),
    Rule("actor.rejection_sampling.weight actor.rejection_sampling.level actor.rejection_sampling.metric",
         of_rejection(lambda c, r: r.weight == "product" and (r.level, r.metric) != ("sequence", "ratio")),
         "only sequences compared by ratio have one weight: set geometric-mean", config=PPOConfig),
    Rule("actor.rejection_sampling.metric actor.rejection_sampling.upper",
         of_rejection(lambda c, r: r.metric == "ratio" and r.upper <= 1), "expected above 1", config=PPOConfig),
    Rule("actor.rejection_sampling.lower actor.rejection_sampling.upper",
         of_rejection(lambda c, r: r.lower is not None and r.lower >= r.upper), "expected lower < upper",
         config=PPOConfig),
    *(
        Rule(f"actor.use_cispo_loss actor.{name}",
             lambda c, m, name=name, fits=fits: c.actor.use_cispo_loss and not fits(getattr(c.actor, name)),  # type: ignore[misc]
             f"CISPO weights each token by its own ratio, bounded above: set the second to {needed}", config=PPOConfig)
        for name, fits, needed in CISPO
    ),
    *(
        Rule(f"actor.use_sapo_loss actor.{name}",
             lambda c, m, name=name, value=value: c.actor.use_sapo_loss and getattr(c.actor, name) != value,  # type: ignore[misc]
             f"the gate of SAPO replaces the clip, on the per-token ratio to the behaviour policy: set the second to {shown(value)}",
             config=PPOConfig)
        for name, value in SAPO.items()
    ),
    Rule("actor.prox_logp_method actor.use_decoupled_loss",
         lambda c, m: c.actor.prox_logp_method != "recompute" and (not c.actor.use_decoupled_loss),
         "only the decoupled loss has a proximal policy of its own: set the second to true", config=PPOConfig),
    Rule("actor.prox_logp_method actor.ppo_n_minibatches",
         lambda c, m: c.actor.prox_logp_method == "reuse_train_logp" and c.actor.ppo_n_minibatches != 1,
         "after a first optimizer step the log-probs of training are no longer those of the step's start: set the second to 1",
         config=PPOConfig),
    Rule("actor.m2_threshold actor.use_decoupled_loss actor.prox_logp_method",
         lambda c, m: c.actor.m2_threshold is not None and (not (c.actor.should_compute_prox_logp() and c.actor.use_decoupled_loss)),
         "M2PO compares computed proximal logprobs with those of the engine: set the second to true and the third to recompute",
         config=PPOConfig),
    Rule("critic.path", lambda c, m: not m.path, "give a model folder, such as ${actor.path}", ("critic",), PPOConfig),
    Rule("critic.optimizer", lambda c, m: m.optimizer is None,
         "values would never be learned; give critic.optimizer.lr, or ${actor.optimizer}", ("critic",), PPOConfig),
    Rule("actor.reward_norm.mean_level",
         lambda c, m: c.actor.reward_norm is not None and c.actor.reward_norm.mean_level == "group",
         "critic is given, and group-relative rewards average 0 for every prompt, which leaves values nothing to "
         "predict: set actor.reward_norm to null, or remove the critic section", ("critic",), PPOConfig),
    Rule("critic.mask_no_eos_with_zero actor.mask_no_eos_with_zero",
         lambda c, m: m.mask_no_eos_with_zero and (not c.actor.mask_no_eos_with_zero),
         "both train on the same rewards: set the second to true", ("critic",), PPOConfig),
    Rule("teacher.path", lambda c, m: not m.path, "give the folder of the model to distil", ("teacher",), PPOConfig),
    Rule("teacher.temperature actor.temperature", lambda c, m: m.temperature != c.actor.temperature,
         "distillation compares the two: they must be equal", ("teacher",), PPOConfig),
    Rule("reward_model.path", lambda c, m: not m.path,
         "give the folder of a model that `RWTrainer` or another trainer of reward models wrote", ("reward_model",),
         PPOConfig),
    Rule("reward_model.init_from_scratch", lambda c, m: m.init_from_scratch,
         "scores of random weights are no rewards: set it to false", ("reward_model",), PPOConfig),
    Rule("actor.dynamic_sampling", lambda c, m: c.actor.dynamic_sampling,
         "reward_model is given, and groups are dropped by the workflow's own rewards, before the reward model scores "
         "them: set the first to false, or score in the workflow (docs/verbs/reward.md)", ("reward_model",), PPOConfig),
    Rule("scheduler.reward_model_service_url scheduler.reward_model_path",
         lambda c, m: c.scheduler.reward_model_path
         and not c.scheduler.reward_model_service_url.startswith(("http://", "https://")),
         f"give the URL of its server, such as {REWARD_SERVICE!r}, or score on the trainer's ranks with reward_model.path",
         config=PPOConfig),
    Rule("scheduler.reward_model_service_url scheduler.reward_model_path",
         lambda c, m: not c.scheduler.reward_model_path and c.scheduler.reward_model_service_url not in ("", REWARD_SERVICE),
         "give the folder of the served model, whose tokenizer renders the conversations", config=PPOConfig),
    Rule("rollout.use_lora actor.use_lora", lambda c, m: c.rollout.use_lora and (not c.actor.use_lora),
         "there is no adapter to sample with: set both to the same value", config=PPOConfig),
    Rule("rollout.pause_mode", lambda c, m: serves_adapters(c) and c.rollout.pause_mode != "abort",
         "servers are sent adapters; a request continues with the adapter that it started with, and only an aborted "
         "one uses the new adapter: set it to abort", config=PPOConfig),
    Rule("actor.enable_delta_weight_update actor.weight_update_mode",
         lambda c, m: c.actor.enable_delta_weight_update and c.actor.weight_update_mode != "xccl",
         "only a broadcast leaves tensors out: set the first to false, or the second to xccl", config=PPOConfig),
    Rule("gconfig.lora_name", lambda c, m: serves_adapters(c) and (not c.gconfig.lora_name), "give the adapter a name",
         config=PPOConfig),
)
# fmt: on


def broken_rules(config: BaseExperimentConfig, role: Role = "train") -> Iterator[str]:
    """Yield one sentence for each rule that a config breaks. Raises AllocationError."""
    for rule in RULES:
        if not isinstance(config, rule.config) or (role == "rollout" and rule.role != "rollout"):
            continue
        for name in rule.models:
            model = getattr(config, name, None) if name else None
            if not (name and model is None) and rule.broken(config, model):
                values = [value_of(config, option.replace("*", name)) for option in rule.options.split()]
                yield f"{' and '.join(values)}; {rule.advice}"


def value_of(config: BaseExperimentConfig, option: str) -> str:
    """Return an option and its value in words."""
    if option == "allocation":
        return f"the allocation {config.allocation}"
    value: Any = config
    for part in option.split("."):
        value = getattr(value, part)
    if dataclasses.is_dataclass(value):
        return f"{option} is given"
    return f"{option} is {'empty' if value == '' else repr(value)}"
