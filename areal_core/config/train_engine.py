# ruff: noqa: RUF009  (option() and section() return dataclass fields)
"""Options of models: engine, optimiser, micro-batches, and the methods (PPO, GRPO, critic)."""

from dataclasses import dataclass
from typing import Any

from areal_core.config.option import ABOVE_0, ABOVE_1, AT_LEAST_0, AT_LEAST_1, DECAY, SHARE, option, section

PROXIMAL = ("recompute", "loglinear", "metrics", "reuse_train_logp")
# options of the actor with the import path of the user's own code
OWN_CODE = ("objective", "loss_fn", "advantage_fn", "reward_shaping_fn", "gae_lambda_fn")


@dataclass
class NormConfig:
    """Normalisation of rewards or advantages."""

    mean_level: str | None = option("batch", "Level of the subtracted mean.", ("batch", "group", None))
    mean_leave1out: bool = option(False, "Leave the element itself out of its mean (RLOO).")
    std_level: str | None = option("batch", "Level of the dividing deviation.", ("batch", "group", None))
    std_unbiased: bool = option(True, "Divide by n - 1 instead of n inside the standard deviation.")
    eps: float = option(1e-5, "Added to the standard deviation.", limits=ABOVE_0)
    group_size: int = option(1, "Samples per prompt: gconfig.n_samples at level group.", limits=AT_LEAST_1)


@dataclass
class MicroBatchSpec:
    """Splitting of a batch into micro-batches."""

    n_mbs: int | None = option(1, "Micro-batches; the minimum with max_tokens_per_mb.", limits=AT_LEAST_1)
    granularity: int = option(1, "Adjacent sequences that stay in one micro-batch.", limits=AT_LEAST_1)
    max_tokens_per_mb: int | None = option(None, "Most tokens of one; empty: no limit.", limits=AT_LEAST_1)
    n_mbs_divisor: int = option(1, "The number of micro-batches is a multiple of this.", limits=AT_LEAST_1)
    packing_algorithm: str = option("ffd", "First-fit decreasing or Karmarkar-Karp.", ("ffd", "kk"))


@dataclass
class OptimizerConfig:
    """Optimiser and learning-rate schedule."""

    type: str = option("adam", "AdamW, SGD, or AdamW with a bf16 first moment.", ("adam", "sgd", "adam_bf16"))
    lr: float = option(1e-3, "Peak learning rate.", limits=AT_LEAST_0)
    weight_decay: float = option(0.01, "Decoupled weight decay.", limits=AT_LEAST_0)
    beta1: float = option(0.9, "Decay of the first moment.", limits=DECAY)
    beta2: float = option(0.999, "Decay of the second moment.", limits=DECAY)
    eps: float = option(1e-8, "Added to the root of the second moment.", limits=ABOVE_0)
    min_lr_ratio: float = option(0.0, "Final learning rate, as a fraction of lr.", limits=SHARE)
    lr_scheduler_type: str = option("constant", "Schedule after warm-up.", ("constant", "linear", "cosine"))
    warmup_steps_proportion: float = option(0.001, "Share of steps in which lr rises from 0.", limits=SHARE)
    gradient_clipping: float = option(1.0, "Maximum gradient norm.", limits=ABOVE_0)
    offload: bool = option(False, "Keep optimiser states in host memory between steps.")
    initial_loss_scale: float = option(2.0**32, "Megatron only.")
    min_loss_scale: float = option(1.0, "Megatron only.")
    loss_scale_window: float = option(5.0, "Megatron only.")
    hysteresis: int = option(2, "Megatron only.")


@dataclass
class FSDPWrapPolicy:
    """Modules that each become a unit of sharding."""

    transformer_layer_cls_to_wrap: list[str] | None = option(None, "Class names; empty: the model's.")


@dataclass
class FSDPEngineConfig:
    """Sharding and memory of FSDP2."""

    wrap_policy: FSDPWrapPolicy | None = option(None, "Modules that each become a unit of sharding.")
    offload_params: bool = option(False, "Keep parameters, gradients and optimiser states in host memory.")
    memory_efficient_load: bool | None = option(
        None, "Rank 0 alone reads the checkpoint. Empty: with several ranks without tensor parallelism."
    )
    per_layer_optim_step: bool = option(False, "Optimiser states in host memory, one layer at a time.")
    optim_step_prefetch_layers: int = option(1, "Layers that it prefetches.", limits=AT_LEAST_0)
    shard_vision_across_sp: bool = option(False, "Shard the vision tower over the sequence group.")
    compile: bool = option(False, "Compile transformer layers with torch.compile.")
    shard_size: int | None = option(None, "Ranks with one copy (HSDP); empty: all.", limits=AT_LEAST_1)
    sync_every_micro_batch: bool = option(
        True,
        "Sum gradients each micro-batch; false: after the last one: faster, holds all, rounds differently.",
    )


@dataclass
class TrainEngineConfig:
    """One trained (or, without an optimiser, only evaluated) model."""

    experiment_name: str = option("", "Empty: the experiment's.")
    trial_name: str = option("", "Empty: the experiment's.")
    path: str = option("", "Folder or hub name of the model.")
    backend: str = option("", "Allocation of training, if allocation_mode is empty: 'fsdp:d4'.")
    attn_impl: str = option(
        "flash_attention_2",
        "Flash attention where device and dtype support it, else as sdpa: one sequence at a time; "
        "batch_invariant: log-probs equal those of the embedded engine to the bit, on a CPU.",
        ("flash_attention_2", "sdpa", "batch_invariant"),
    )
    use_kernels: bool = option(False, "Use kernels from the Hugging Face hub.")
    use_liger: bool = option(False, "Fused norms and MLPs of the package liger-kernel; on a GPU only.")
    init_from_scratch: bool = option(False, "Random weights instead of the checkpoint's.")
    is_critic: bool = option(False, "A value head instead of a language-model head; a critic has one anyway.")
    temperature: float = option(1.0, "Divides the logits; must be gconfig.temperature.", limits=ABOVE_0)
    mb_spec: MicroBatchSpec = section(MicroBatchSpec, "Splitting of a batch into micro-batches.")
    pad_to_maximum: bool = option(False, "Pad every micro-batch to max_tokens_per_mb.")
    disable_dropout: bool = option(False, "Set every dropout to 0.")
    freeze_vision_tower: bool = option(False, "Train only the text model, not tower and projector.")
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass.")
    dtype: str = option("bfloat16", "Of the forward; masters are fp32.", ("bfloat16", "float32", "float16"))
    grad_reduce_dtype: str = option("float32", "Of gradient sums over ranks.", ("float32", "bfloat16"))
    parity_check: bool = option(True, "Check packed log-probs with the model's own first.")
    nonfinite: str = option("stop", "At an update that is not finite: stop, or skip it.", ("stop", "skip"))
    nonfinite_skips: int | None = option(10, "Updates that may be skipped; empty: all.", limits=AT_LEAST_0)
    optimizer: OptimizerConfig | None = option(None, "Empty: the model is only evaluated.")
    weight_update_mode: str = option("xccl", "How weights reach servers.", ("xccl", "disk"))
    enable_delta_weight_update: bool = option(
        False, "Send only tensors that changed; the servers' checksums of all are compared each time."
    )
    weight_update_anchor_interval: int = option(
        0,
        "Deltas until all tensors are sent again; 0: only at the start and after a failure.",
        limits=AT_LEAST_0,
    )
    fsdp: FSDPEngineConfig = section(FSDPEngineConfig, "Sharding and memory.")
    offload: bool = option(False, "Move the model to host memory while it is idle.")
    use_lora: bool = option(False, "Train a low-rank adapter instead of the weights.")
    lora_rank: int = option(32, "Rank of the adapter.")
    lora_alpha: int = option(16, "The adapter is scaled by lora_alpha / lora_rank.")
    target_modules: list[str] = section(list, "Modules with an adapter; empty, all-linear: all linear ones.")
    peft_type: str = option("lora", "Kind of adapter.", ("lora",))
    enable_tree_training: bool = option(
        False,
        "Compute what rows begin with in common once. Empty in ref, critic, teacher: as in actor.",
    )
    scheduling_spec: Any = option(None, "Of the actor: environment, command and resources of ranks.")
    scheduling_strategy: Any = option(None, "{type: colocation, target: rollout}: on the servers' devices.")
    _version: str = option("v1", "Interface version of a single-controller worker.", ("v1", "v2"))


@dataclass
class RejectionSamplingConfig:
    """Bounds on how far off-policy tokens or sequences may be, and the action outside of them."""

    level: str = option("token", "Bounds of tokens, or of complete sequences.", ("token", "sequence"))
    action: str = option("mask", "Drop what is out of bounds, or clamp its weight.", ("mask", "clamp"))
    metric: str = option("ratio", "What is bounded.", ("ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"))
    agg: str = option("mean", "Aggregation over tokens at level sequence.", ("mean", "sum", "max"))
    weight: str = option("geometric-mean", "Mean or sum of log-ratios.", ("geometric-mean", "product"))
    upper: float = option(5.0, "Upper bound.")
    lower: float | None = option(None, "Lower bound; empty: none.")


@dataclass
class PPOActorConfig(TrainEngineConfig):
    """The policy of PPO, GRPO and related algorithms."""

    ppo_n_minibatches: int = option(4, "Optimiser steps per batch.", limits=AT_LEAST_1)
    eps_clip: float = option(0.2, "The policy ratio is clipped below 1 - eps_clip.", limits=AT_LEAST_0)
    eps_clip_higher: float | None = option(None, "and above 1 + this; empty: eps_clip.", limits=AT_LEAST_0)
    c_clip: float | None = option(None, "Dual clip: of negative advantages; empty: off.", limits=ABOVE_1)
    m2_threshold: float | None = option(None, "M2PO: bound on the log-ratio's moment.", limits=ABOVE_0)
    reward_norm: NormConfig | None = option(None, "Normalisation of sequence rewards.")
    reward_scaling: float = option(1.0, "Factor on the biased reward.")
    reward_bias: float = option(0.0, "Added to the reward before scaling.")
    reward_clip: float = option(20.0, "Bound on the scaled reward.", limits=ABOVE_0)
    overlong_reward_penalty: bool = option(False, "Penalise completions that approach max_new_tokens (DAPO).")
    overlong_tokens: int | None = option(None, "Length of the zone in which the penalty grows.")
    overlong_penalty_factor: float | None = option(None, "Penalty at max_new_tokens.")
    mask_no_eos_with_zero: bool = option(False, "No reward if truncated; bootstrap from a critic.")
    discount: float = option(1.0, "Discount of GAE.", limits=SHARE)
    gae_lambda: float = option(1.0, "Lambda of GAE.", limits=SHARE)
    gae_lambda_fn: str | None = option(None, "Import path of a function that gives each row its lambda.")
    gae_lambda_kwargs: dict[str, Any] = section(dict, "Arguments of that function, by name.")
    gae_timestep_unit: str = option("token", "A step of GAE: a token, or a turn.", ("token", "turn"))
    adv_norm: NormConfig | None = option(None, "Normalisation of token advantages.")
    kl_ctl: float = option(0.1, "Weight of the KL in the reward; needs ref, else 0.", limits=AT_LEAST_0)
    kl_estimator: str = option("k1", "Estimator of that KL.", ("k1", "k2", "k3"))
    kl_loss_coef: float = option(0.0, "Weight of the KL in the loss; needs ref.", limits=AT_LEAST_0)
    kl_loss_estimator: str = option("k3", "Of that KL; k1 has no gradient on average.", ("k1", "k2", "k3"))
    loss_aggregation: str = option(
        "token-mean",
        "Mean over all tokens; or over sequences, of the mean or sum of their tokens, or of that sum "
        "divided by max_new_tokens.",
        ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus in the loss.", limits=AT_LEAST_0)
    use_sapo_loss: bool = option(False, "SAPO: a soft gate instead of the clip.")
    sapo_tau_pos: float = option(1.0, "Temperature of the gate for positive advantages.", limits=ABOVE_0)
    sapo_tau_neg: float = option(1.05, "Temperature of the gate for negative advantages.", limits=ABOVE_0)
    use_cispo_loss: bool = option(False, "CISPO: the clipped ratio as a weight without gradient.")
    recompute_logprob: bool = option(False, "Use the trainer's logprobs instead of the inference engine's.")
    use_decoupled_loss: bool = option(False, "Clip around the proximal policy; correct behaviour.")
    rejection_sampling: RejectionSamplingConfig | None = option(None, "Bounds on that correction.")
    behav_imp_weight_cap: float | None = option(None, "Drop tokens with a larger correction (older).")
    importance_sampling_level: str = option("token", "Ratio per token or sequence.", ("token", "sequence"))
    prox_logp_method: str = option("recompute", "Proximal logprobs.", PROXIMAL)
    dynamic_sampling: bool = option(False, "Drop groups whose rewards are all equal.")
    group_size: int = option(1, "Older option; must equal gconfig.n_samples.", limits=AT_LEAST_1)
    objective: str | None = option(None, "Import path of a class derived from PolicyObjective.")
    loss_fn: str | None = option(None, "Import path of a policy loss in place of the clipped one.")
    advantage_fn: str | None = option(None, "Import path of a function that computes the advantages.")
    reward_shaping_fn: str | None = option(None, "Import path of a function that shapes the rewards.")
    objective_kwargs: dict[str, Any] = section(dict, "Their arguments, by name.")
    dynamic_filter_fn: str | None = option(None, "Import path of a filter of prompts, by their rows.")
    log_agent_stats: bool = option(False, "Log statistics of agent episodes.")
    log_agent_stats_keys: list[str] = section(list, "Keys of those statistics.")
    max_new_tokens: int = option(1024, "As gconfig's: of the overlong penalty and seq-mean-token-sum-norm.")

    def should_compute_prox_logp(self) -> bool:
        """Return whether a step starts with a forward pass for the trainer's own logprobs."""
        if self.use_decoupled_loss:
            return self.prox_logp_method in ("recompute", "metrics")
        return self.recompute_logprob

    def uses_reference(self) -> bool:
        """Return whether rewards or loss contain the KL to a reference model."""
        return self.kl_ctl > 0 or self.kl_loss_coef > 0


@dataclass
class PPOCriticConfig(TrainEngineConfig):
    """The value model of PPO; a language model gets a value head, initialised to 0."""

    ppo_n_minibatches: int = option(4, "Optimiser steps per batch.", limits=AT_LEAST_1)
    eps_clip: float = option(0.5, "Values are clipped to this distance from the old ones.", limits=ABOVE_0)
    mask_no_eos_with_zero: bool = option(False, "As the actor's, which must be true for true.")


@dataclass
class RewardModelConfig(TrainEngineConfig):
    """A trained reward model, which scores the rows of a batch and is not trained."""

    weight: float = option(1.0, "Factor on a row's score, which is added to its reward.")


@dataclass
class DPOEngineConfig(TrainEngineConfig):
    """The policy of direct preference optimisation."""

    beta: float = option(0.1, "Weight of the implicit KL penalty against the reference.", limits=ABOVE_0)
    loss_type: str = option("sigmoid", "Log-sigmoid of the margin, or IPO's square.", ("sigmoid", "ipo"))


@dataclass
class TeacherConfig(TrainEngineConfig):
    """The model whose distribution is distilled."""

    rl_loss_weight: float = option(1.0, "Weight of the policy loss; 0: distil only.", limits=AT_LEAST_0)
    distill_loss_weight: float = option(0.005, "Weight of the distillation loss.", limits=ABOVE_0)
