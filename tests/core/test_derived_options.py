"""Options that follow from others, of a file that gives few of them."""

import json

import pytest

from areal_core.config import GRPOConfig
from areal_core.config.loading import load_with_notes
from areal_core.errors import ConfigError

FIVE_LINES = """
algorithm: grpo
actor: {path: some/model, optimizer: {lr: 1.0e-5}}
train_dataset: {path: rows.jsonl, type: rl, batch_size: 8}
gconfig: {n_samples: 4, max_new_tokens: 64, temperature: 0.8}
device: cpu
"""


@pytest.fixture
def load(tmp_path):
    file = tmp_path / "sums.yaml"

    def call(text, *overrides, cls=GRPOConfig):
        file.write_text(text)
        config, _, notes = load_with_notes(["--config", str(file), *overrides], cls)
        return config, notes

    return call


def test_a_file_of_five_lines_is_complete(load):
    config, notes = load(FIVE_LINES)
    assert (config.experiment_name, config.trial_name) == ("sums", "trial0")
    assert str(config.allocation) == "embedded|fsdp:d1"
    assert config.rollout.consumer_batch_size == 8
    assert config.actor.temperature == 0.8
    assert config.actor.reward_norm.group_size == 4
    assert config.actor.max_new_tokens == 64
    assert config.actor.kl_ctl == 0.0
    assert notes[1:] == [
        "not given, so chosen: experiment_name=sums, trial_name=trial0, allocation_mode=embedded|fsdp:d1"
    ]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "rollout.consumer_batch_size=4",
            "rollout.consumer_batch_size is 4 and train_dataset.batch_size is 8",
        ),
        ("actor.temperature=1.0", "actor.temperature is 1.0 and gconfig.temperature is 0.8"),
        ("actor.reward_norm.group_size=2", "actor.reward_norm.group_size is 2 and gconfig.n_samples is 4"),
        ("actor.kl_ctl=0.1", "actor.kl_ctl is 0.1 and ref is None"),
        ("actor.ppo_n_minibatches=64", "actor.ppo_n_minibatches is 64 and each rank has 32 sequences"),
    ],
)
def test_what_is_set_and_contradicts_is_refused(load, override, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load(FIVE_LINES, override)


@pytest.mark.parametrize(
    ("limits", "max_tokens"),
    [
        ("sglang.context_length=80 allocation_mode=sglang:d1+fsdp:d1", 80),
        ("actor.mb_spec.max_tokens_per_mb=90", 90),
        ("actor.mb_spec.max_tokens_per_mb=90 ref.path=m ref.mb_spec.max_tokens_per_mb=70", 70),
        ("actor.mb_spec.max_tokens_per_mb=96", 32768),
        ("actor.mb_spec.max_tokens_per_mb=90 gconfig.max_tokens=80", 80),
    ],
)
def test_prompt_and_completion_together_fit_where_each_alone_does(load, limits, max_tokens):
    config, notes = load(FIVE_LINES, "train_dataset.max_length=32", *limits.split())
    assert config.gconfig.max_tokens == max_tokens
    assert (f"gconfig.max_tokens={max_tokens}" in notes[-1]) == (
        max_tokens in (90, 70) or "80 alloc" in limits
    )


@pytest.mark.parametrize("family", ["llava", "smolvlm"])
def test_vision_models_of_other_families_are_refused(family, load, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "vision_config": {}}))
    with pytest.raises(ConfigError) as error:
        load(FIVE_LINES, f"actor.path={tmp_path}")
    assert str(error.value) == (
        f"actor.path is {str(tmp_path)!r}, a vision model of type {family!r}, which is not supported: "
        "train one of qwen2_vl, qwen2_5_vl, qwen3_vl, gemma3, or a text model"
    )


@pytest.mark.parametrize("given", ["", "allocation_mode=fsdp:d1", "actor.backend=fsdp:d1"])
def test_a_run_without_servers_of_its_own_samples_from_those_that_run_already(given, load, monkeypatch):
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", "a:1,b:2")
    config, notes = load(FIVE_LINES, *filter(None, [given]))
    assert str(config.allocation) == "sglang:d2+fsdp:d1"
    said = "AREAL_LLM_SERVER_ADDRS names 2 servers, so allocation_mode=sglang:d2+fsdp:d1"
    assert (said in notes) == bool(given)
