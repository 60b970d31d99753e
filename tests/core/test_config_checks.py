"""Options that must agree: each conflict is one sentence with both names and both values."""

import pytest

from areal_core.config import (
    MicroBatchSpec,
    NormConfig,
    OptimizerConfig,
    PPOActorConfig,
    PPOConfig,
    PPOCriticConfig,
    RejectionSamplingConfig,
    TeacherConfig,
    check_config,
)
from areal_core.errors import ConfigError

SHARED = {"actor.weight_update_mode": "disk", "actor.offload": True, "sglang.enable_memory_saver": True}
ADAPTERS = {
    "rollout.use_lora": True,
    "sglang.enable_lora": True,
    "sglang.max_lora_rank": 8,
    "actor.use_lora": True,
    "actor.lora_rank": 8,
    "actor.weight_update_mode": "disk",
}
ALONE = {"actor.reward_norm": None}  # a critic learns nothing from rewards relative to their group


def sound_config() -> PPOConfig:
    config = PPOConfig(experiment_name="a", trial_name="b", allocation_mode="sglang:d1+fsdp:d2")
    config.actor = PPOActorConfig(
        path="model",
        optimizer=OptimizerConfig(),
        mb_spec=MicroBatchSpec(max_tokens_per_mb=96),
        kl_ctl=0.0,
        ppo_n_minibatches=2,
        reward_norm=NormConfig("group", std_level="group", group_size=4),
    )
    config.gconfig.n_samples, config.gconfig.max_new_tokens = 4, 64
    config.train_dataset.path, config.train_dataset.type = "data", "rl"
    config.train_dataset.batch_size, config.train_dataset.max_length = 8, 32
    config.rollout.consumer_batch_size = 8
    return config


def critic(**options) -> PPOCriticConfig:
    return PPOCriticConfig(**{"path": "m", "optimizer": OptimizerConfig()} | options)


def changed(config, changes):
    for name, value in changes.items():
        *sections, leaf = name.split(".")
        section = config
        for part in sections:
            section = getattr(section, part)
        setattr(section, leaf, value)
    return config


def test_sound_config_passes_without_notes():
    assert check_config(sound_config()) == []


@pytest.mark.parametrize(
    ("changes", "names_and_values"),
    [
        ({"rollout.consumer_batch_size": 4}, ["rollout.consumer_batch_size is 4", "train_dataset.batch_size is 8"]),
        ({"rollout.queue_size": 4}, ["rollout.queue_size is 4", "train_dataset.batch_size is 8"]),
        ({"actor.reward_norm": NormConfig("group", group_size=2)}, ["actor.reward_norm.group_size is 2", "gconfig.n_samples is 4"]),
        ({"actor.adv_norm": NormConfig(std_level="group")}, ["actor.adv_norm.group_size is 1", "gconfig.n_samples is 4"]),
        ({"actor.group_size": 8}, ["actor.group_size is 8", "gconfig.n_samples is 4"]),
        ({"gconfig.n_samples": 1, "actor.reward_norm": NormConfig("group")}, ["gconfig.n_samples is 1", "a group of one"]),
        ({"gconfig.temperature": 0.5}, ["actor.temperature is 1.0", "gconfig.temperature is 0.5"]),
        ({"gconfig.temperature": 0.0, "actor.temperature": 0.0}, ["above 0"]),
        ({"allocation_mode": "sglang:d1+fsdp:d3"}, ["train_dataset.batch_size is 8", "d3"]),
        ({"allocation_mode": "sglang:d2|fsdp:d2", **SHARED, "rollout.max_head_offpolicyness": 2},
         ["rollout.max_head_offpolicyness is 2", "sglang:d2|fsdp:d2 samples and trains on the same devices", "to 0"]),
        ({"allocation_mode": "sglang:d2|fsdp:d2", **SHARED, "actor.weight_update_mode": "xccl"},
         ["actor.weight_update_mode is 'xccl'", "NCCL accepts a device once", "to disk"]),
        ({"allocation_mode": "sglang:d2|fsdp:d2", **SHARED, "sglang.enable_memory_saver": False},
         ["sglang.enable_memory_saver is False", "to true"]),
        ({"allocation_mode": "sglang:d2|fsdp:d2", **SHARED, "actor.offload": False}, ["actor.offload is False"]),
        ({"allocation_mode": "sglang:d2|fsdp:d2", **SHARED, "actor.kl_ctl": 0.1, "ref": PPOActorConfig()},
         ["ref.offload is False"]),
        ({"allocation_mode": "sglang:d2|fsdp:d2", **SHARED, "scheduler.type": "ray"}, ["scheduler.type is 'ray'", "local launcher"]),
        ({"allocation_mode": "sglang:d1|fsdp:d2", **SHARED}, ["1 of them for servers and 2 for ranks"]),
        ({"actor.enable_delta_weight_update": True, "actor.weight_update_mode": "disk"},
         ["actor.enable_delta_weight_update is True", "weight_update_mode is 'disk'", "to xccl"]),
        ({"actor.kl_ctl": 0.1}, ["actor.kl_ctl is 0.1", "ref is None"]),
        ({"actor.kl_loss_coef": 0.1}, ["actor.kl_loss_coef is 0.1", "ref is None", "set actor.kl_loss_coef=0"]),
        ({"actor.kl_loss_coef": 0.1, "ref": PPOActorConfig(temperature=0.5)}, ["ref.temperature is 0.5"]),
        ({"actor.kl_ctl": 0.1, "ref": PPOActorConfig(temperature=0.5)}, ["ref.temperature is 0.5", "actor.temperature is 1.0"]),
        ({"actor.mb_spec.max_tokens_per_mb": 95}, ["max_tokens_per_mb is 95", "max_length is 32", "max_new_tokens is 64", "96 tokens"]),
        ({"sglang.context_length": 80}, ["sglang.context_length is 80", "96 tokens"]),
        ({"allocation_mode": "vllm:d1+fsdp:d2", "vllm.max_model_len": 80}, ["vllm.max_model_len is 80", "96 tokens"]),
        ({"allocation_mode": "vllm:d2|fsdp:d2", **SHARED}, ["only SGLang servers", "'vllm:d2+fsdp:d2'"]),
        ({"actor.scheduling_spec": {"cpu": "x"}}, ["actor.scheduling_spec.cpu is 'x'"]),
        ({"allocation_mode": "vllm:d1+fsdp:d2", "gconfig.top_p": 0.9}, ["gconfig.top_p is 0.9", "use sglang"]),
        ({"gconfig.min_new_tokens": 65}, ["gconfig.min_new_tokens is 65", "gconfig.max_new_tokens is 64"]),
        ({"debug.dump_rollout_data": True, "debug.replay_rollout_data": True, "debug.path": "x"},
         ["debug.dump_rollout_data is True", "debug.replay_rollout_data is True"]),
        ({"debug.replay_rollout_data": True}, ["debug.replay_rollout_data is True", "debug.path is empty"]),
        ({"total_train_steps": 0}, ["total_train_steps is 0"]),
        ({"gconfig.n_samples": 0}, ["gconfig.n_samples is 0; expected at least 1"]),
        ({"gconfig.top_p": float("nan")}, ["gconfig.top_p is nan; expected above 0, up to 1"]),
        ({"actor.optimizer.beta1": 1.0}, ["actor.optimizer.beta1 is 1.0; expected 0 or more, and below 1"]),
        ({"evaluator.freq_steps": -3}, ["evaluator.freq_steps is -3; expected 0 or more"]),
        ({"actor.optimizer": None}, ["actor.optimizer is None"]),
        ({"actor.optimizer.eps": 0.0}, ["actor.optimizer.eps is 0.0; expected above 0"]),
        ({"actor.path": ""}, ["actor.path is empty"]),
        ({"actor.ppo_n_minibatches": 17}, ["actor.ppo_n_minibatches is 17", "16 sequences"]),
        ({"actor.overlong_reward_penalty": True, "actor.max_new_tokens": 64}, ["overlong_tokens is None", "penalty_factor is None"]),
        ({"actor.overlong_reward_penalty": True, "actor.overlong_tokens": 16, "actor.overlong_penalty_factor": 1.0},
         ["actor.max_new_tokens is 1024", "gconfig.max_new_tokens is 64"]),
        ({"actor.c_clip": 0.9}, ["actor.c_clip is 0.9"]),
        ({"actor.eps_clip": -0.1}, ["actor.eps_clip is -0.1"]),
        ({"actor.rejection_sampling": RejectionSamplingConfig(), "actor.behav_imp_weight_cap": 5.0}, ["behav_imp_weight_cap is 5.0"]),
        ({"actor.rejection_sampling": RejectionSamplingConfig(action="clamp", metric="kl_k2")}, ["'clamp'", "'kl_k2'"]),
        ({"actor.rejection_sampling": RejectionSamplingConfig(weight="product")}, ["weight is 'product'", "level is 'token'"]),
        ({"actor.loss_aggregation": "seq-mean-token-sum-norm", "actor.max_new_tokens": 7}, ["actor.max_new_tokens is 7"]),
        ({"actor.rejection_sampling": RejectionSamplingConfig(upper=1.0)}, ["'ratio'", "upper is 1.0"]),
        ({"actor.rejection_sampling": RejectionSamplingConfig(lower=6.0)}, ["lower is 6.0", "upper is 5.0"]),
        ({"rollout.tokenizer_path": "x", "tokenizer_path": "y"}, ["rollout.tokenizer_path is 'x'", "tokenizer_path is 'y'"]),
        ({"actor.kl_estimator": "k4"}, ["actor.kl_estimator is 'k4'", "'k1', 'k2', 'k3'"]),
        ({"actor.reward_norm": NormConfig(mean_level="row")}, ["actor.reward_norm.mean_level is 'row'"]),
        ({"rollout.max_head_offpolicyness": -1}, ["rollout.max_head_offpolicyness is -1"]),
        ({"rollout.max_failures": -1}, ["rollout.max_failures is -1"]),
        ({"rollout.max_concurrent_rollouts": 0}, ["rollout.max_concurrent_rollouts is 0"]),
        ({"async_training": False, "rollout.max_head_offpolicyness": 2}, ["async_training is False", "max_head_offpolicyness is 2"]),
        ({"actor.dynamic_sampling": True, "gconfig.n_samples": 1, "actor.reward_norm": None},
         ["actor.dynamic_sampling is True", "gconfig.n_samples is 1"]),
        ({"actor.use_sapo_loss": True, "actor.use_decoupled_loss": True}, ["use_sapo_loss is True", "use_decoupled_loss is True"]),
        ({"actor.use_cispo_loss": True}, ["eps_clip_higher is None", "CISPO", "a number above 0"]),
        ({"actor.use_cispo_loss": True, "actor.eps_clip_higher": 4.0, "actor.use_sapo_loss": True}, ["CISPO", "to false"]),
        ({"actor.use_decoupled_loss": True, "actor.prox_logp_method": "reuse_train_logp"}, ["ppo_n_minibatches", "to 1"]),
        ({"actor.use_sapo_loss": True, "actor.c_clip": 3.0}, ["actor.c_clip is 3.0", "gate of SAPO", "set the second to null"]),
        ({"actor.use_sapo_loss": True, "actor.importance_sampling_level": "sequence"}, ["importance_sampling_level is 'sequence'"]),
        ({"actor.m2_threshold": 0.04}, ["actor.m2_threshold is 0.04", "actor.use_decoupled_loss is False"]),
        ({"actor.m2_threshold": 0.04, "actor.use_decoupled_loss": True, "actor.prox_logp_method": "loglinear"}, ["is 'loglinear'"]),
        ({"actor.m2_threshold": 0.0, "actor.use_decoupled_loss": True}, ["actor.m2_threshold is 0.0; expected above 0"]),
        ({"actor.prox_logp_method": "loglinear", "actor.use_decoupled_loss": True, "consistency.every_k_steps": 1},
         ["consistency.every_k_steps is 1", "set actor.prox_logp_method to metrics"]),
        ({"actor.prox_logp_method": "metrics"}, ["actor.prox_logp_method is 'metrics'", "actor.use_decoupled_loss is False"]),
        ({"actor.prox_logp_method": "loglinear"}, ["actor.prox_logp_method is 'loglinear'", "actor.use_decoupled_loss is False"]),
        ({"device": "tpu"}, ["device is 'tpu'", "'auto', 'cpu', 'cuda'"]),
        ({"actor.use_liger": True, "device": "cpu"}, ["actor.use_liger is True and device is 'cpu'"]),
        ({"actor.fsdp.compile": True, "allocation_mode": "fsdp:d1t2"}, ["actor.fsdp.compile is True and the allocation fsdp:d1t2"]),
        ({"actor.dtype": "float16"}, ["actor.dtype is 'float16'", "use bfloat16 or float32"]),
        ({"actor.fsdp.shard_size": 3, "allocation_mode": "fsdp:d4"}, ["shard_size is 3 and the allocation fsdp:d4; "]),
        ({"actor.fsdp.shard_size": 2, "allocation_mode": "fsdp:d4t2"}, ["shard_size is 2 and the allocation fsdp:d4t2; "]),
        ({"critic": critic()}, ["actor.reward_norm.mean_level is 'group'; critic is given"]),
        ({"critic": critic(path="")}, ["critic.path is empty"]),
        ({"critic": critic(optimizer=None)}, ["critic.optimizer is None; values would never be learned"]),
        ({"critic": critic(optimizer=OptimizerConfig(gradient_clipping=0.0))},
         ["critic.optimizer.gradient_clipping is 0.0; expected above 0"]),
        ({"critic": critic(eps_clip=0.0)}, ["critic.eps_clip is 0.0; expected above 0"]),
        ({"critic": critic(ppo_n_minibatches=17)}, ["critic.ppo_n_minibatches is 17 and each rank has 16 sequences"]),
        ({"critic": critic(mask_no_eos_with_zero=True)},
         ["critic.mask_no_eos_with_zero is True and actor.mask_no_eos_with_zero is False"]),
        ({"critic": critic(mb_spec=MicroBatchSpec(max_tokens_per_mb=95))}, ["critic.mb_spec.max_tokens_per_mb is 95"]),
        ({"teacher": TeacherConfig(path="t", mb_spec=MicroBatchSpec(max_tokens_per_mb=95))},
         ["teacher.mb_spec.max_tokens_per_mb is 95"]),
        ({"teacher": TeacherConfig(path="")}, ["teacher.path is empty"]),
        ({"teacher": TeacherConfig(path="t", temperature=0.7)}, ["teacher.temperature is 0.7 and actor.temperature is 1.0"]),
        ({"teacher": TeacherConfig(path="t", rl_loss_weight=-1.0)}, ["teacher.rl_loss_weight is -1.0"]),
        ({"teacher": TeacherConfig(path="t", distill_loss_weight=0.0)}, ["teacher.distill_loss_weight is 0.0; expected above 0"]),
        ({"actor.discount": 1.5}, ["actor.discount is 1.5; expected 0 to 1"]),
        ({"actor.gae_lambda": -0.1}, ["actor.gae_lambda is -0.1; expected 0 to 1"]),
        (ADAPTERS | {"actor.lora_rank": 0}, ["actor.lora_rank is 0 and actor.lora_alpha is 16; expected 1 or more"]),
        (ADAPTERS | {"actor.use_lora": False}, ["rollout.use_lora is True and actor.use_lora is False"]),
        (ADAPTERS | {"actor.weight_update_mode": "xccl"}, ["which they load only from a folder: set it to disk"]),
        (ADAPTERS | {"actor.lora_rank": 16}, ["sglang.max_lora_rank is 8 and actor.lora_rank is 16"]),
        (ADAPTERS | {"sglang.max_lora_rank": None}, ["sglang.max_lora_rank is None and actor.lora_rank is 8"]),
        (ADAPTERS | {"sglang.enable_lora": None}, ["the servers would refuse adapters: set it to true"]),
        (ADAPTERS | {"sglang.max_loaded_loras": 1}, ["a weight update needs 2: the new adapter and the previous one"]),
        (ADAPTERS | {"sglang.lora_target_modules": ["q_proj"], "actor.target_modules": ["q_proj", "v_proj"]},
         ["sglang.lora_target_modules is ['q_proj'] and actor.target_modules is ['q_proj', 'v_proj']"]),
        (ADAPTERS | {"rollout.pause_mode": "in_place"}, ["only an aborted one uses the new adapter: set it to abort"]),
        (ADAPTERS | {"gconfig.lora_name": ""}, ["gconfig.lora_name is empty"]),
        (ADAPTERS | {"ref": PPOActorConfig(path="m", use_lora=True)}, ["ref.use_lora is True; the model is not trained"]),
        (ADAPTERS | {"actor.peft_type": "ia3"}, ["actor.peft_type is 'ia3'; expected one of 'lora'"]),
    ],
)  # fmt: skip
def test_disagreement_is_named_with_both_values(changes, names_and_values):
    with pytest.raises(ConfigError) as error:
        check_config(changed(sound_config(), changes))
    for part in names_and_values:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"actor.kl_ctl": 0.1, "ref": PPOActorConfig(path="model")},
        {"gconfig.n_samples": 1, "actor.reward_norm": NormConfig("group"), "rollout.agent.mode": "online"},
        {"gconfig.max_tokens": 96, "train_dataset.max_length": 64},
        {"allocation_mode": "", "rollout.backend": "embedded", "actor.backend": "fsdp:d2"},
        {"allocation_mode": "embedded|fsdp:d2", "sglang.context_length": 80},
        {"actor.use_sapo_loss": True},
        {"actor.m2_threshold": 0.04, "actor.use_decoupled_loss": True},
        {"actor.prox_logp_method": "loglinear", "actor.use_decoupled_loss": True},
        {"actor.group_size": 4, "actor.rejection_sampling": RejectionSamplingConfig()},
        {"actor.use_liger": True},  # device is "auto": there may be a GPU
        {"actor.dtype": "bfloat16", "actor.fsdp.shard_size": 2, "allocation_mode": "sglang:d1+fsdp:d4"},
        ALONE | {"critic": critic(is_critic=True), "teacher": TeacherConfig(path="t")},
        {"teacher": TeacherConfig(path="t", rl_loss_weight=0.0, distill_loss_weight=1.0)},
        {"critic": critic(), "actor.reward_norm": NormConfig("batch", std_level=None, group_size=4)},
    ],
)
def test_options_that_agree_pass(changes):
    check_config(changed(sound_config(), changes))


@pytest.mark.parametrize(
    ("changes", "error_text"),
    [
        ({"ref": PPOActorConfig(use_kernels=True)}, "ref.use_kernels is True"),
        ({"recover.mode": "auto"}, "recover.mode is 'auto'"),
        ({"gconfig.use_beam_search": True}, "gconfig.use_beam_search is True"),
        ({"train_dataset.drop_last": False}, "train_dataset.drop_last is False"),
        (
            {"sglang.cuda_graph_max_bs": 8},
            "sglang.cuda_graph_max_bs is 8, which is not available: SGLang 0.5.23 calls it",
        ),
        (
            {"rollout.return_routed_experts": True, "allocation_mode": "vllm:d1+fsdp:d1"},
            "rollout.return_routed_experts is True and the allocation vllm:d1+fsdp:d1; the servers are vLLM's",
        ),
        (
            {"rollout.return_routed_weights": True, "allocation_mode": "embedded|fsdp:d1"},
            "rollout.return_routed_weights is True and rollout.return_routed_experts is False; weights are of",
        ),
        (
            {"rollout.return_routed_weights": True, "rollout.return_routed_experts": True},
            "rollout.return_routed_weights is True and the allocation sglang:d1+fsdp:d2; these servers report no",
        ),
        (
            {"rollout.return_routed_experts": True, "actor.fsdp.compile": True},
            "rollout.return_routed_experts is True and actor.fsdp.compile is True",
        ),
        (
            {"rollout.return_routed_experts": True, "actor.enable_tree_training": True},
            "rollout.return_routed_experts is True and actor.enable_tree_training is True",
        ),
        (
            {"rollout.return_routed_experts": True, "actor.attn_impl": "batch_invariant"},
            "rollout.return_routed_experts is True and actor.attn_impl is 'batch_invariant'",
        ),
        (
            {"actor.enable_tree_training": True, "actor.attn_impl": "batch_invariant"},
            "actor.enable_tree_training is True and actor.attn_impl is 'batch_invariant'",
        ),
    ],
)
def test_option_without_its_feature_is_refused_by_name(changes, error_text):
    with pytest.raises(ConfigError) as error:
        check_config(changed(sound_config(), changes))
    assert error_text in str(error.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"actor.optimizer": OptimizerConfig(hysteresis=3)}, "actor.optimizer.hysteresis is 3"),
        ({"train_dataset.num_workers": 4}, "train_dataset.num_workers is 4"),
        ({"cluster.cluster_name": "mine"}, "cluster.cluster_name is 'mine'"),
        ({"cluster.name_resolve.etcd3_addr": "x:1"}, "cluster.name_resolve.etcd3_addr is 'x:1'"),
        ({"scheduler.deploy_mode": "colocation"}, "scheduler.deploy_mode is 'colocation'"),
        ({"saver.fileroot": "/other"}, "saver.fileroot is '/other' and cluster.fileroot is '/tmp/areal-"),
        ({"actor.experiment_name": "b"}, "actor.experiment_name is 'b' and experiment_name is 'a'"),
        ({"ref": PPOActorConfig(scheduling_spec=[{"env_vars": {"A": 1}}])}, "ref.scheduling_spec.env_vars has no"),
        (
            {"actor.scheduling_spec": {"cpu": 2}, "rollout.scheduling_spec": [{"mem": 3, "gpu": 1}]},
            "actor.scheduling_spec.cpu, rollout.scheduling_spec.mem have no effect",
        ),
        ({"ref": PPOActorConfig(scheduling_strategy={"type": "colocation", "target": "critic"})}, "ref.scheduling_strategy is"),
    ],
)  # fmt: skip
def test_an_option_without_effect_has_one_note(changes, sentence):
    [note] = check_config(changed(sound_config(), changes))
    assert note.startswith(sentence)
