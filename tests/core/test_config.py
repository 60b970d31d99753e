"""A file and overrides become one typed object, or one error message."""

from pathlib import Path

import pytest

from areal_core.config import GRPOConfig, PPOActorConfig, PPOConfig, SFTConfig, load_expr_config
from areal_core.config.names import all_options, help_of
from areal_core.errors import ConfigError

GRPO_0_5_1 = "\n" + Path(__file__).with_name("grpo_0_5_1.yaml").read_text()

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
    both = refused(["--config", write(GRPO_0_5_1.replace("seed: 7", "sead: 7")), override, "actr.x=1"])
    assert [line.split(": ")[1][:14] for line in both.splitlines()][::2] == ["unknown option"] * 2


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
