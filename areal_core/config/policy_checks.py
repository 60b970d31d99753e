"""Couplings of policy optimisation, of the critic and of the teacher; `checks.py` runs them."""

from collections.abc import Iterator

from areal_core.config.derived import num_given_servers
from areal_core.config.experiment import PPOConfig
from areal_core.config.generation import GenerationHyperparameters
from areal_core.config.presets import shown
from areal_core.config.servers import server_options
from areal_core.config.services import REWARD_SERVICE
from areal_core.config.train_engine import NormConfig, TrainEngineConfig
from areal_core.config.vision import model_facts
from areal_core.environment import ADDRESSES_VARIABLE

ALL_SPARSE_IN_SGLANG = ("qwen2_moe", "qwen3_moe")  # the families whose `mlp_only_layers` it ignores


def rollout_limits_let_something_run(config: PPOConfig) -> Iterator[str]:
    rollout = config.rollout
    if not config.async_training and rollout.max_head_offpolicyness > 0:
        yield (
            f"async_training is False and rollout.max_head_offpolicyness is {rollout.max_head_offpolicyness}; "
            "synchronous training uses samples of its own version only: set the second to 0"
        )
    if config.actor.dynamic_sampling and config.gconfig.n_samples == 1:
        yield (
            "actor.dynamic_sampling is True and gconfig.n_samples is 1; the rewards of a group of one never differ, "
            "so every prompt would be dropped: use 2 or more"
        )


def consistency_has_logprobs_to_compare(config: PPOConfig) -> Iterator[str]:
    every, actor = config.consistency.every_k_steps, config.actor
    if every > 0 and not actor.should_compute_prox_logp():
        yield (
            f"consistency.every_k_steps is {every}, actor.use_decoupled_loss is {actor.use_decoupled_loss} and "
            f"actor.recompute_logprob is {actor.recompute_logprob}; without the trainer's own logprobs nothing can be compared: "
            + (
                "set actor.prox_logp_method to metrics"
                if actor.use_decoupled_loss
                else "set actor.recompute_logprob to true"
            )
        )


def consumer_batch_is_the_train_batch(config: PPOConfig) -> Iterator[str]:
    consumer, batch_size = config.rollout.consumer_batch_size, config.train_dataset.batch_size
    if consumer != batch_size:
        yield f"rollout.consumer_batch_size is {consumer} and train_dataset.batch_size is {batch_size}; they must be equal"
    queue_size = config.rollout.queue_size
    if queue_size is not None and queue_size < batch_size:
        yield f"rollout.queue_size is {queue_size} and train_dataset.batch_size is {batch_size}; the queue must hold a batch"


def groups_have_n_samples(config: PPOConfig) -> Iterator[str]:
    n_samples = config.gconfig.n_samples
    for name in ("reward_norm", "adv_norm"):
        norm: NormConfig | None = getattr(config.actor, name)
        if norm is None or "group" not in (norm.mean_level, norm.std_level):
            continue
        if norm.group_size != n_samples:
            yield f"actor.{name}.group_size is {norm.group_size} and gconfig.n_samples is {n_samples}; they must be equal"
        elif n_samples == 1 and config.rollout.agent.mode != "online":  # whose episodes have several rows
            yield f"actor.{name} works per group and gconfig.n_samples is 1; a group of one has nothing to compare: use 2 or more"
    if config.actor.group_size not in (1, n_samples):
        yield f"actor.group_size is {config.actor.group_size} and gconfig.n_samples is {n_samples}; they must be equal"


def temperatures_agree(config: PPOConfig) -> Iterator[str]:
    trained, sampled = config.actor.temperature, config.gconfig.temperature
    if trained != sampled or sampled <= 0:
        yield f"actor.temperature is {trained} and gconfig.temperature is {sampled}; they must be equal and above 0"


def kl_penalty_has_a_reference(config: PPOConfig) -> Iterator[str]:
    actor, ref = config.actor, config.ref
    for name in ("kl_ctl", "kl_loss_coef"):
        if getattr(actor, name) > 0 and ref is None:
            yield f"actor.{name} is {getattr(actor, name)} and ref is None; set actor.{name}=0 or give a ref section"
    if actor.uses_reference() and ref is not None and ref.temperature != actor.temperature:
        yield (
            f"ref.temperature is {ref.temperature} and actor.temperature is {actor.temperature}; "
            "the KL penalty compares the two: they must be equal"
        )


def given_servers_are_those_of_the_allocation(config: PPOConfig) -> Iterator[str]:
    count, allocation = num_given_servers(), config.allocation
    if not count or allocation.kind != "decoupled" or config.debug.replay_rollout_data:
        return
    assert allocation.rollout is not None  # a decoupled allocation has servers
    if count != allocation.rollout.data:
        yield (
            f"{ADDRESSES_VARIABLE} names {count} inference servers and the allocation {allocation} has "
            f"{allocation.rollout.data}: name as many, give {allocation.trainer!r} to use those that are named, or "
            "unset the variable to let the run start its own"
        )


def longest_sequence_is_trained(config: PPOConfig) -> Iterator[str]:
    names = ("actor", "ref", "critic", "teacher", "reward_model")
    models: dict[str, TrainEngineConfig | None] = {name: getattr(config, name) for name in names}
    limits = {
        f"{name}.mb_spec.max_tokens_per_mb": model.mb_spec.max_tokens_per_mb
        for name, model in models.items()
        if model is not None
    }
    yield from too_short(config, limits)


def longest_sequence_is_sampled(config: PPOConfig) -> Iterator[str]:
    gconfig = config.gconfig
    if config.allocation.has_servers:
        options = server_options(config, config.allocation)
        yield from too_short(config, {options.names["context_length"]: options.context_length})
    if gconfig.min_new_tokens > gconfig.max_new_tokens:
        yield f"gconfig.min_new_tokens is {gconfig.min_new_tokens} and gconfig.max_new_tokens is {gconfig.max_new_tokens}"


def too_short(config: PPOConfig, limits: dict[str, int | None]) -> Iterator[str]:
    """Yield one sentence for each limit, by its option, below the longest possible sequence."""
    gconfig, max_length = config.gconfig, config.train_dataset.max_length
    longest = min(gconfig.max_tokens, (max_length or 0) + gconfig.max_new_tokens)
    lengths = (
        f"train_dataset.max_length is {max_length} and gconfig.max_new_tokens is {gconfig.max_new_tokens}"
    )
    for name, limit in limits.items():
        if limit is not None and limit < longest:
            yield (
                f"{name} is {limit}; {lengths}: a sequence of {longest} tokens would not fit: raise the first, "
                "or lower one of the others or gconfig.max_tokens"
            )


def servers_report_what_is_trained(config: PPOConfig) -> Iterator[str]:
    gconfig = config.gconfig
    every_token = GenerationHyperparameters.top_k
    if config.allocation.rollout_backend == "vllm" and (gconfig.top_p < 1 or gconfig.top_k < every_token):
        yield (
            f"gconfig.top_p is {gconfig.top_p} and gconfig.top_k is {gconfig.top_k}; vLLM's log-probs are normalised over the "
            f"tokens that remain, the trainer's over all: set them to 1 and {every_token}, or use sglang"
        )


def sglang_serves_layers_without_experts(config: PPOConfig) -> Iterator[str]:
    facts = model_facts(config.actor.path)
    dense, step = facts.get("mlp_only_layers"), facts.get("decoder_sparse_step", 1)
    if config.allocation.rollout_backend != "sglang" or facts.get("model_type") not in ALL_SPARSE_IN_SGLANG:
        return
    if dense or step != 1:
        yield (
            f"actor.path is {config.actor.path!r}, whose config has mlp_only_layers {dense} and decoder_sparse_step {step}; "
            "SGLang 0.5.23 gives every layer experts, and would sample with weights that no file has: "
            "use embedded|fsdp or vllm in allocation_mode"
        )


def routed_experts_can_be_replayed(config: PPOConfig) -> Iterator[str]:
    if not config.rollout.return_routed_experts:
        return
    asked = "rollout.return_routed_experts is True"
    if config.allocation.rollout_backend == "vllm":
        yield f"{asked} and the servers are vLLM's, which are not asked for experts: use sglang, or set it to false"
    if config.actor.fsdp.compile:
        yield f"{asked} and actor.fsdp.compile is True; compiled layers cannot replay experts: set one to false"
    if config.actor.enable_tree_training:
        yield f"{asked} and actor.enable_tree_training is True; rows that share tokens may have other experts: set one to false"
    if config.actor.attn_impl == "batch_invariant":
        yield f"{asked} and actor.attn_impl is 'batch_invariant', whose engine keeps no experts: use attn_impl=sdpa"


def trees_have_an_attention(config: PPOConfig) -> Iterator[str]:
    if config.actor.enable_tree_training and config.actor.attn_impl == "batch_invariant":
        yield (
            "actor.enable_tree_training is True and actor.attn_impl is 'batch_invariant'; the bits of trees are not "
            "those of sampled rows: set the first to false, or use attn_impl=sdpa"
        )


def overlong_penalty_is_complete(config: PPOConfig) -> Iterator[str]:
    actor, max_new_tokens = config.actor, config.gconfig.max_new_tokens
    if not actor.overlong_reward_penalty:
        return
    if actor.overlong_tokens is None or actor.overlong_penalty_factor is None:
        yield (
            f"actor.overlong_reward_penalty is True, actor.overlong_tokens is {actor.overlong_tokens} and "
            f"actor.overlong_penalty_factor is {actor.overlong_penalty_factor}; both must be given"
        )
    elif not 0 < actor.overlong_tokens <= max_new_tokens:
        yield f"actor.overlong_tokens is {actor.overlong_tokens} and gconfig.max_new_tokens is {max_new_tokens}; expected 1 to the second"


def lengths_of_the_loss_are_those_sampled(config: PPOConfig) -> Iterator[str]:
    actor, max_new_tokens = config.actor, config.gconfig.max_new_tokens
    uses_it = actor.overlong_reward_penalty or actor.loss_aggregation == "seq-mean-token-sum-norm"
    if uses_it and actor.max_new_tokens != max_new_tokens:
        yield f"actor.max_new_tokens is {actor.max_new_tokens} and gconfig.max_new_tokens is {max_new_tokens}; they must be equal"


def rejection_sampling_is_consistent(config: PPOConfig) -> Iterator[str]:
    rejection, cap = config.actor.rejection_sampling, config.actor.behav_imp_weight_cap
    if rejection is None:
        return
    name = "actor.rejection_sampling"
    if cap is not None:
        yield f"{name} is given and actor.behav_imp_weight_cap is {cap}; keep the first, whose upper is the cap"
    if rejection.action == "clamp" and rejection.metric != "ratio":
        yield f"{name}.action is 'clamp' and {name}.metric is {rejection.metric!r}; only a ratio can be clamped"
    if rejection.weight == "product" and (rejection.level, rejection.metric) != ("sequence", "ratio"):
        yield (
            f"{name}.weight is 'product', {name}.level is {rejection.level!r} and {name}.metric is "
            f"{rejection.metric!r}; only sequences compared by ratio have one weight: set geometric-mean"
        )
    if rejection.metric == "ratio" and rejection.upper <= 1:
        yield f"{name}.metric is 'ratio' and {name}.upper is {rejection.upper}; expected above 1"
    if rejection.lower is not None and rejection.lower >= rejection.upper:
        yield f"{name}.lower is {rejection.lower} and {name}.upper is {rejection.upper}; expected lower < upper"


def sapo_has_no_clip(config: PPOConfig) -> Iterator[str]:
    actor = config.actor
    if not actor.use_sapo_loss:
        return
    wanted = {
        "use_decoupled_loss": False,
        "importance_sampling_level": "token",
        "eps_clip_higher": None,
        "c_clip": None,
    }
    for name, value in wanted.items():
        if getattr(actor, name) != value:
            yield (
                f"actor.use_sapo_loss is True and actor.{name} is {getattr(actor, name)!r}; the gate of SAPO replaces "
                f"the clip, on the per-token ratio to the behaviour policy: set the second to {shown(value)}"
            )


def proximal_policy_is_there_to_compare(config: PPOConfig) -> Iterator[str]:
    actor = config.actor
    if actor.prox_logp_method != "recompute" and not actor.use_decoupled_loss:
        yield (
            f"actor.prox_logp_method is {actor.prox_logp_method!r} and actor.use_decoupled_loss is False; only the decoupled loss has a "
            "proximal policy of its own: set the second to true"
        )
    if actor.m2_threshold is None:
        return
    if not actor.should_compute_prox_logp() or not actor.use_decoupled_loss:
        yield (
            f"actor.m2_threshold is {actor.m2_threshold}, actor.use_decoupled_loss is {actor.use_decoupled_loss} and "
            f"actor.prox_logp_method is {actor.prox_logp_method!r}; M2PO compares computed proximal logprobs with those of the "
            "engine: set the second to true and the third to recompute"
        )


def minibatches_have_rows(config: PPOConfig) -> Iterator[str]:
    num_rows = config.train_dataset.batch_size * config.gconfig.n_samples
    train = config.allocation.train
    per_rank = num_rows // train.data if train is not None else num_rows
    for name, model in {"actor": config.actor, "critic": config.critic}.items():
        if model is not None and model.ppo_n_minibatches > max(per_rank, 1):
            yield (
                f"{name}.ppo_n_minibatches is {model.ppo_n_minibatches} and each rank has {per_rank} sequences "
                "(train_dataset.batch_size x gconfig.n_samples / ranks); expected 1 to that many"
            )


def tokenizers_agree(config: PPOConfig) -> Iterator[str]:
    client, run = config.rollout.tokenizer_path, config.tokenizer_path
    if client and client != (run or config.actor.path):
        yield f"rollout.tokenizer_path is {client!r} and tokenizer_path is {run!r} (empty: actor.path); they must be equal"


def critic_can_be_trained(config: PPOConfig) -> Iterator[str]:
    critic = config.critic
    if critic is None:
        return
    if not critic.path:
        yield "critic.path is empty; give a model folder, such as ${actor.path}"
    if critic.optimizer is None:
        yield "critic.optimizer is empty, so values would never be learned; give critic.optimizer.lr, or ${actor.optimizer}"


def critic_has_returns_to_learn(config: PPOConfig) -> Iterator[str]:
    actor, critic = config.actor, config.critic
    if critic is None:
        return
    if actor.reward_norm is not None and actor.reward_norm.mean_level == "group":
        yield (
            "critic is given and actor.reward_norm.mean_level is 'group'; group-relative rewards average 0 for every prompt, which "
            "leaves values nothing to predict: set actor.reward_norm to null, or remove the critic section"
        )
    if critic.mask_no_eos_with_zero and not actor.mask_no_eos_with_zero:
        yield (
            "critic.mask_no_eos_with_zero is True and actor.mask_no_eos_with_zero is False; both train on the same rewards: "
            "set the second to true"
        )


def teacher_scores_what_the_actor_sampled(config: PPOConfig) -> Iterator[str]:
    actor, teacher = config.actor, config.teacher
    if teacher is None:
        return
    if not teacher.path:
        yield "teacher.path is empty; give the folder of the model to distil"
    if teacher.temperature != actor.temperature:
        yield (
            f"teacher.temperature is {teacher.temperature} and actor.temperature is {actor.temperature}; distillation compares the two: "
            "they must be equal"
        )


def reward_model_scores_every_row(config: PPOConfig) -> Iterator[str]:
    model = config.reward_model
    if model is None:
        return
    if not model.path:
        yield "reward_model.path is empty; give the folder of a model that `RWTrainer` or another trainer of reward models wrote"
    if model.init_from_scratch:
        yield "reward_model.init_from_scratch is True; scores of random weights are no rewards: set it to false"
    if config.actor.dynamic_sampling:
        yield (
            "actor.dynamic_sampling is True and reward_model is given; groups are dropped by the workflow's own rewards, before the "
            "reward model scores them: set the first to false, or score in the workflow (docs/reward_models.md)"
        )


def served_reward_model_is_complete(config: PPOConfig) -> Iterator[str]:
    scheduler = config.scheduler
    path, url = scheduler.reward_model_path, scheduler.reward_model_service_url
    if path and not url.startswith(("http://", "https://")):
        yield (
            f"scheduler.reward_model_service_url is {url!r} and scheduler.reward_model_path is {path!r}; give the URL of its "
            f"server, such as {REWARD_SERVICE!r}, or score on the trainer's ranks with reward_model.path"
        )
    if not path and url not in ("", REWARD_SERVICE):
        yield (
            f"scheduler.reward_model_service_url is {url!r} and scheduler.reward_model_path is empty; give the folder of the served "
            "model, whose tokenizer renders the conversations"
        )


def servers_and_trainer_can_take_turns(config: PPOConfig) -> Iterator[str]:
    allocation, rollout, sglang = config.allocation, config.rollout, config.sglang
    if not allocation.shares_devices:
        return
    assert allocation.rollout is not None
    assert allocation.train is not None
    shared = f"the allocation {allocation} samples and trains on the same devices"
    separate = f"'{allocation.engine}+{allocation.trainer}'"
    if allocation.rollout_backend != "sglang":
        yield f"{shared}, and only SGLang servers release their memory here: use sglang, or {separate}"
    if allocation.rollout.world_size != allocation.train.world_size:
        yield (
            f"{shared}, and has {allocation.rollout.world_size} of them for servers and {allocation.train.world_size} for ranks; "
            "the numbers must be equal"
        )
    if config.scheduler.type not in (None, "local"):
        yield f"{shared}, and scheduler.type is {config.scheduler.type!r}; only the local launcher places both there: use {separate}"
    wrong = {
        "rollout.max_head_offpolicyness": (rollout.max_head_offpolicyness, 0, "nothing is sampled meanwhile"),
        "actor.weight_update_mode": (config.actor.weight_update_mode, "disk", "NCCL accepts a device once"),
        "rollout.use_lora": (rollout.use_lora, False, "released weights are loaded again in full"),
        "sglang.enable_lora": (bool(sglang.enable_lora), False, "released weights are loaded again in full"),
    }
    if config.device != "cpu":  # where SGLang has no memory saver
        wrong["sglang.enable_memory_saver"] = (sglang.enable_memory_saver, True, "servers keep their memory")
    for name in ("actor", "ref", "critic", "teacher", "reward_model"):
        model = getattr(config, name)
        if model is not None and not model.fsdp.offload_params:
            wrong[f"{name}.offload"] = (model.offload, True, "the model stays on the device")
    for name, (value, needed, why) in wrong.items():
        if value != needed:
            yield f"{name} is {value!r} and {shared} in turn, where {why}: set the first to {shown(needed)}"


ROLLOUT_COUPLINGS = (longest_sequence_is_sampled, tokenizers_agree)  # without a trainer, too
PPO_COUPLINGS = (
    *ROLLOUT_COUPLINGS,
    given_servers_are_those_of_the_allocation,
    servers_and_trainer_can_take_turns,
    rollout_limits_let_something_run,
    sglang_serves_layers_without_experts,
    routed_experts_can_be_replayed,
    trees_have_an_attention,
    consistency_has_logprobs_to_compare,
    consumer_batch_is_the_train_batch,
    groups_have_n_samples,
    temperatures_agree,
    kl_penalty_has_a_reference,
    longest_sequence_is_trained,
    servers_report_what_is_trained,
    overlong_penalty_is_complete,
    lengths_of_the_loss_are_those_sampled,
    rejection_sampling_is_consistent,
    sapo_has_no_clip,
    proximal_policy_is_there_to_compare,
    minibatches_have_rows,
    critic_can_be_trained,
    critic_has_returns_to_learn,
    teacher_scores_what_the_actor_sampled,
    reward_model_scores_every_row,
    served_reward_model_is_complete,
)
