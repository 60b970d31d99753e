"""A file and overrides become one typed object, or one error message."""

from pathlib import Path

import pytest
import yaml

from areal_core.config import GRPOConfig, PPOActorConfig, PPOConfig, SFTConfig, load_expr_config
from areal_core.config.names import all_options, help_of
from areal_core.errors import ConfigError

REFUSED = yaml.load(Path(__file__).with_name("config_refused.yaml").read_text(), yaml.CSafeLoader)
FIVE_LINES = Path(__file__).with_name("five_lines.yaml").read_text()
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


def named(row: dict) -> str:
    return row.get("override") or " to ".join(row["change"])


@pytest.mark.parametrize("row", REFUSED, ids=named)
def test_what_cannot_be_loaded_is_one_sentence(write, row):
    text = (FIVE_LINES if row.get("file") == "short" else GRPO_0_5_1).replace(*row.get("change", ("", "")), 1)
    message = refused(["--config", write(text), *filter(None, [row.get("override")])], GRPOConfig)
    assert "\n" not in message
    assert [part for part in row["says"] if part not in message] == []


def test_every_mistake_of_a_file_and_its_overrides_is_named(write):
    path = write(GRPO_0_5_1.replace("seed: 7", "sead: 7"))
    message = refused(["--config", path, "actor.eps_clp=0.3", "actr.x=1"])
    assert [line.split(": ")[1] for line in message.splitlines()][1:] == [
        "unknown option 'actor.eps_clp'; did you mean 'actor.eps_clip'?",
        "unknown option 'actr'; did you mean 'actor'?",
    ]


def test_every_option_is_documented():
    for cls in (PPOConfig, SFTConfig):
        assert [name for name in all_options(cls) if not help_of(cls, name)] == []
