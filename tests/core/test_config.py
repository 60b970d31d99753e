"""A file and overrides become one typed object, or one error message."""

import pytest

from areal_core.config import GRPOConfig, PPOActorConfig, PPOConfig, SFTConfig, load_expr_config
from areal_core.config.names import all_options, help_of
from areal_core.errors import ConfigError

GRPO_0_5_1 = """
experiment_name: math
trial_name: first
seed: 7
async_training: true
allocation_mode: sglang.d4p1t1+d4p1t1
total_train_epochs: 2
tokenizer_path: ${actor.path}
cluster:
  n_nodes: 1
  n_gpus_per_node: 8
  fileroot: /tmp/runs
  name_resolve: {type: nfs, nfs_record_root: /tmp/names}
gconfig: {n_samples: 4, max_new_tokens: 512, temperature: 0.9}
rollout:
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  max_concurrent_rollouts: 64
  consumer_batch_size: ${train_dataset.batch_size}
  max_head_offpolicyness: 2
  schedule_policy: round_robin
actor:
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  path: some/model
  dtype: bfloat16
  gradient_checkpointing: true
  mb_spec: {max_tokens_per_mb: 4096}
  optimizer: {type: adam, lr: 2e-6, weight_decay: 0.02, lr_scheduler_type: constant}
  group_size: ${gconfig.n_samples}
  eps_clip: 0.4
  temperature: ${gconfig.temperature}
  reward_scaling: 10.0
  reward_bias: -0.5
  kl_ctl: 0.0
  ppo_n_minibatches: 1
  recompute_logprob: true
  use_decoupled_loss: true
  behav_imp_weight_cap: 5.0
  dynamic_sampling: false
  reward_norm: {mean_level: group, std_level: group, group_size: "${gconfig.n_samples}"}
  adv_norm: {mean_level: batch, std_level: batch}
ref:
  path: ${actor.path}
  dtype: ${actor.dtype}
  optimizer: null
sglang: {model_path: "${actor.path}", random_seed: "${seed}", skip_tokenizer_init: true, mem_fraction_static: 0.8}
train_dataset: {path: some/data, type: rl, batch_size: 16, shuffle: true, pin_memory: true, num_workers: 4, max_length: 256}
valid_dataset: {path: some/data, type: rl, batch_size: 16}
saver: {experiment_name: "${experiment_name}", trial_name: "${trial_name}", fileroot: "${cluster.fileroot}", freq_epochs: 1}
recover: {mode: disabled, freq_secs: 3600}
evaluator: {freq_epochs: 1}
stats_logger:
  fileroot: ${cluster.fileroot}
  wandb: {mode: disabled}
  swanlab: {mode: disabled}
  tensorboard: {path: /tmp/board}
launcher:
  inference_server_cpus_per_gpu: 4
  trainer_env_vars: A=1
  slurm: {mount: "/a:/a"}
"""

GRPO_HEAD = (
    GRPO_0_5_1.replace("allocation_mode: sglang.d4p1t1+d4p1t1\n", "enable_offload: false\nscheduler: {type: null}\n")
    .replace("  schedule_policy: round_robin\n", "  routing_strategy: round_robin\n  dump_to_file: true\n  backend: sglang:d4p1t1\n")
    .replace("  behav_imp_weight_cap: 5.0\n", "  rejection_sampling: {level: token, action: mask, metric: ratio, upper: 5.0}\n")
    .replace(
        "  path: some/model\n",
        "  path: some/model\n  backend: fsdp:d4p1t1\n  max_new_tokens: ${gconfig.max_new_tokens}\n"
        "  scheduling_spec:\n    - {task_type: worker, gpu: 1, cmd: python3 -m something}\n",
    )
    .replace("  optimizer: null\n", "  optimizer: null\n  scheduling_strategy: {type: colocation, target: actor}\n")
    + "vllm: {max_model_len: 4096, swap_space: 8}\nperf_tracer: {enabled: false, session_tracer: {enabled: false}}\n"
)  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def write_yaml(text: str) -> str:
        file = tmp_path / "run.yaml"
        file.write_text(text)
        return str(file)

    return write_yaml


def refused(arguments: list[str], cls: type = PPOConfig) -> str:
    with pytest.raises(ConfigError) as error:
        load_expr_config(arguments, cls)
    return str(error.value)


@pytest.mark.parametrize("text", [GRPO_0_5_1, GRPO_HEAD], ids=["0.5.1", "head"])
def test_both_upstream_spellings_of_a_grpo_run_load(write, text):
    path = write(text)
    config, where = load_expr_config(["train.py", "--config", path], GRPOConfig)
    assert where == path
    assert config.tokenizer_path == config.sglang.model_path == config.ref.path == "some/model"
    assert config.actor.optimizer.lr == 2e-6
    assert config.actor.reward_norm.group_size == config.gconfig.n_samples == 4
    assert config.actor.temperature == 0.9
    assert config.rollout.consumer_batch_size == 16
    assert config.sglang.random_seed == 7
    assert config.valid_dataset.split == "test"
    assert config.valid_dataset.shuffle is False
    assert config.actor.should_compute_prox_logp()


def test_overrides_set_add_and_delete(write):
    path = write(GRPO_0_5_1)
    overrides = [
        "actor.optimizer.lr=1e-4",
        "+debug.path=/tmp/record",
        "~actor.eps_clip",
        "gconfig.stop_token_ids=[1, 2]",
        "sglang.attention_backend=null",
        "train_dataset.dataset_kwargs={num_rows: 8}",
        "trial_name=a=b",
    ]
    config, _ = load_expr_config(["--config", path, *overrides], GRPOConfig)
    assert config.actor.optimizer.lr == 1e-4
    assert config.debug.path == "/tmp/record"
    assert config.actor.eps_clip == PPOActorConfig().eps_clip == 0.2
    assert config.gconfig.stop_token_ids == [1, 2]
    assert config.sglang.attention_backend is None
    assert config.train_dataset.dataset_kwargs == {"num_rows": 8}
    assert config.trial_name == "a=b"


@pytest.mark.parametrize(
    ("override", "error_text"),
    [
        ("actor.eps_clp=0.3", "unknown option 'actor.eps_clp'; did you mean 'actor.eps_clip'?"),
        ("actr.eps_clip=0.3", "unknown option 'actr'; did you mean 'actor'?"),
        ("~actor.eps_clp", "unknown option 'actor.eps_clp'; did you mean 'actor.eps_clip'?"),
        ("actor.learning_rate=1", "unknown option 'actor.learning_rate'"),
        ("actor.max_tokens_per_mb=1", "did you mean 'actor.mb_spec.max_tokens_per_mb'?"),
        ("actor.megatron.use_deterministic_algorithms=1", "is deterministic=true here"),
        ("model.path=x", "unknown option 'model'; it is called 'actor'"),
        ("debug.dump_rollout=true", "did you mean 'debug.dump_rollout_data'?"),
    ],
)
def test_unknown_option_is_named_with_the_nearest_one(write, override, error_text):
    message = refused(["--config", write(GRPO_0_5_1), override])
    assert message.startswith(f"override {override!r}: ")
    assert message.endswith(error_text)


@pytest.mark.parametrize(
    ("change", "error_text"),
    [
        (("seed: 7", "seed: soon"), ["seed", "soon"]),
        (("lr: 2e-6", "lr: [1]"), ["actor.optimizer.lr"]),
        (("sglang: {", "sglang: 3 #"), ["sglang is 3; expected a section"]),
        (("sglang: {", "sglang: null #"), ["sglang"]),
        (("mode: disabled, freq", "mode: {a: 1}, freq"), ["recover.mode"]),
        (("path: some/data, type: rl, batch_size: 16, shuffle", "type: rl, batch_size: 16, shuffle"), ["train_dataset.path"]),
        (("random_seed: \"${seed}\"", "random_seed: \"${sed}\""), ["sglang.random_seed", "sed"]),
        (("seed: 7", "seed: 7\nseed: 8"), ["is not valid YAML", "seed"]),
        (("seed: 7", "seed: [7"), ["is not valid YAML"]),
    ],
)  # fmt: skip
def test_damaged_file_gives_one_sentence(write, change, error_text):
    path = write(GRPO_0_5_1.replace(*change, 1))
    message = refused(["--config", path])
    assert message.startswith(path)
    assert "\n" not in message
    for part in error_text:
        assert part in message


@pytest.mark.parametrize(
    ("override", "error_text"),
    [
        ("seed", "expected option=value"),
        ("=3", "expected option=value"),
        ("seed.x=3", "seed is not a section but 7"),
        ("seed=[1", "not valid YAML"),
    ],
)
def test_wrong_override_is_refused(write, override, error_text):
    message = refused(["--config", write(GRPO_0_5_1), override])
    assert repr(override) in message
    assert error_text in message


def test_every_option_is_documented():
    for cls in (PPOConfig, SFTConfig):
        assert [name for name in all_options(cls) if not help_of(cls, name)] == []
