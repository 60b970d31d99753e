"""Options that follow from others, of a file that gives few of them."""

import json

import pytest

from areal_core.config import DPOConfig, GRPOConfig, PPOConfig, SFTConfig
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


def test_derived_options_follow_overrides_and_are_followed_by_interpolations(load):
    text = FIVE_LINES + "rollout: {max_concurrent_rollouts: '${rollout.consumer_batch_size}'}\n"
    config, _ = load(text, "train_dataset.batch_size=16", "gconfig.temperature=0.5", "gconfig.n_samples=2")
    assert (config.rollout.consumer_batch_size, config.rollout.max_concurrent_rollouts) == (16, 16)
    assert (config.actor.temperature, config.actor.reward_norm.group_size) == (0.5, 2)


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


@pytest.mark.parametrize(
    "limit",
    ["actor.mb_spec.max_tokens_per_mb=31", "gconfig.max_tokens=90 actor.mb_spec.max_tokens_per_mb=89"],
)
def test_prompts_that_do_not_fit_and_a_length_that_is_given_are_refused(load, limit):
    with pytest.raises(ConfigError, match="would not fit: raise the first, or lower one of the others"):
        load(FIVE_LINES, "train_dataset.max_length=32", *limit.split())


def test_the_kl_penalty_is_on_with_a_reference_and_off_without(load):
    text = FIVE_LINES.replace("algorithm: grpo\n", "")
    without, notes = load(text)
    assert without.actor.kl_ctl == 0.0
    assert "actor.kl_ctl=0.0" in notes[-1]
    with_reference, _ = load(text + "ref: {path: some/model}\n")
    assert (with_reference.actor.kl_ctl, with_reference.ref.temperature) == (0.1, 0.8)


def test_few_rows_are_trained_in_fewer_minibatches(load):
    config, notes = load(FIVE_LINES, "train_dataset.batch_size=2", "gconfig.n_samples=2", "allocation_mode=embedded|fsdp:d2")  # fmt: skip
    assert config.actor.ppo_n_minibatches == 2
    assert "actor.ppo_n_minibatches=2" in notes[-1]


def test_a_completion_fits_into_the_limits_that_are_given(load):
    text = FIVE_LINES.replace("max_new_tokens: 64, ", "")
    config, _ = load(text, "actor.mb_spec.max_tokens_per_mb=512", "train_dataset.max_length=128")
    assert config.gconfig.max_new_tokens == 384


def test_recovery_alone_writes_checkpoints(load):
    config, notes = load(FIVE_LINES, "recover.mode=auto")
    assert (config.recover.freq_steps, config.recover.freq_secs, config.recover.freq_epochs) == (
        10,
        600,
        None,
    )
    assert notes[-1].endswith("recover.freq_steps=10, recover.freq_secs=600")
    assert load(FIVE_LINES, "recover.mode=auto", "recover.freq_epochs=1")[0].recover.freq_steps is None


def test_supervised_files_have_an_allocation_too_and_no_rollout_options(load):
    text = "actor: {path: m, optimizer: {lr: 1.0e-5}}\ntrain_dataset: {path: x, type: sft, batch_size: 2}\n"
    assert str(load(text, cls=SFTConfig)[0].allocation) == "fsdp:d1"
    limited = text.replace("optimizer", "mb_spec: {max_tokens_per_mb: 512}, optimizer")
    config, notes = load(limited + "gconfig: {max_new_tokens: 4096}\n", cls=SFTConfig)
    assert config.actor.mb_spec.max_tokens_per_mb == 512
    assert notes[0] == "gconfig has no effect: a supervised method samples nothing"
    dpo = text.replace("type: sft", "type: dpo").replace("path: m,", "path: m, temperature: 0.5,")
    assert load(dpo + "ref: {path: m}\n", cls=DPOConfig)[0].ref.temperature == 0.5


def test_servers_alone_need_no_optimizer(load):
    text = FIVE_LINES.replace(", optimizer: {lr: 1.0e-5}", "")
    assert load(text, "allocation_mode=sglang:d1")[0].allocation.kind == "servers_only"
    assert load(text, "allocation_mode=sglang:d2+eval")[0].allocation.kind == "eval"
    sft = "actor: {path: m}\ntrain_dataset: {path: d, type: sft}\n"
    with pytest.raises(ConfigError, match=r"allocation sglang:d2\+eval evaluates samples and SFTConfig has"):
        load(sft, "allocation_mode=sglang:d2+eval", cls=SFTConfig)


def test_options_of_a_script_are_explained_with_their_declaration(load):
    with pytest.raises(ConfigError) as error:
        load(FIVE_LINES + "max_turns: 2\n")
    assert str(error.value).partition("unknown option ")[2].splitlines() == [
        "'max_turns'; if it is an option of your script, declare it in the script and load MyConfig:",
        "    @dataclass",
        "    class MyConfig(PPOConfig):",
        "        max_turns: int = 2",
    ]
    with pytest.raises(ConfigError, match=r"tir: Any = None"):
        load(FIVE_LINES + "tir: {max_turns: 2}\n")
    with pytest.raises(ConfigError, match=r"export_style: str = 'concat'"):
        load(FIVE_LINES + "export_style: concat\n")


@pytest.mark.parametrize("family", ["llava", "smolvlm"])
def test_vision_models_of_other_families_are_refused(family, load, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "vision_config": {}}))
    with pytest.raises(ConfigError) as error:
        load(FIVE_LINES, f"actor.path={tmp_path}")
    assert str(error.value) == (
        f"actor.path is {str(tmp_path)!r}, a vision model of type {family!r}, which is not supported: "
        "train one of qwen2_vl, qwen2_5_vl, qwen3_vl, gemma3, or a text model"
    )


def test_image_datasets_are_refused_with_a_text_model(load, tmp_path):
    options = [f"actor.path={tmp_path}", "train_dataset.path=BUAADreamer/clevr_count_70k"]
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(
        ConfigError, match=r"is 'BUAADreamer/clevr_count_70k', a dataset of images, and actor\.path"
    ):
        load(FIVE_LINES, *options, cls=PPOConfig)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "vision_config": {}}')
    load(FIVE_LINES, *options, cls=PPOConfig)
    for dataset in ("BUAADreamer/clevr_count_70k", "shapes"):
        with pytest.raises(ConfigError, match="a dataset of images, which are not sent to vLLM"):
            load(
                FIVE_LINES, *options, f"train_dataset.path={dataset}", "allocation_mode=vllm:d1+fsdp:d1",
                cls=PPOConfig,
            )  # fmt: skip


def test_checkpoints_of_another_vision_family_are_refused(load, tmp_path):
    facts = {"text": {"model_type": "qwen3"}, "old": {"model_type": "qwen2_vl", "vision_config": {}}}
    for name, found in (facts | {"new": {"model_type": "qwen3_vl", "vision_config": {}}}).items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(found))
    (tmp_path / "adapter").mkdir()
    of = lambda name: f"evaluator.checkpoints=[{tmp_path / name}]"  # noqa: E731
    for actor, other, kinds in (
        ("old", "new", "a vision model of type 'qwen3_vl', and .* is a vision model of type 'qwen2_vl'"),
        ("old", "text", "a text model, and .* is a vision model of type 'qwen2_vl'"),
        ("text", "new", "a vision model of type 'qwen3_vl', and .* is a text model"),
    ):
        with pytest.raises(ConfigError, match=rf"{kinds}: evaluate it by itself, with actor\.path="):
            load(FIVE_LINES, f"actor.path={tmp_path / actor}", of(other), cls=PPOConfig)
        load(FIVE_LINES, f"actor.path={tmp_path / actor}", of(actor), cls=PPOConfig)
        load(FIVE_LINES, f"actor.path={tmp_path / actor}", of("adapter"), cls=PPOConfig)


def test_an_option_that_refers_to_the_derived_one_is_no_cycle(load):
    text = FIVE_LINES.replace("batch_size: 8", "batch_size: '${rollout.consumer_batch_size}'")
    config, _ = load(text.replace(", temperature: 0.8", ""), "actor.temperature=${gconfig.temperature}")
    assert (config.train_dataset.batch_size, config.rollout.consumer_batch_size) == (1, 1)
    assert (config.actor.temperature, config.gconfig.temperature) == (1.0, 1.0)
    config, _ = load(text.replace(", temperature: 0.8", ""), "actor.temperature=0.6")
    assert config.gconfig.temperature == 0.6


@pytest.mark.parametrize(
    "override",
    ["train_dataset.batch_size=many", "train_dataset.max_length=long", "allocation_mode=[1]", "gconfig=3"],
)
def test_a_value_of_another_type_is_one_sentence(load, override):
    with pytest.raises(ConfigError) as error:
        load(FIVE_LINES + "sglang: {context_length: 512}\n", override)
    assert override.partition("=")[0].partition(".")[0] in str(error.value)


@pytest.mark.parametrize("given", ["", "allocation_mode=fsdp:d1", "actor.backend=fsdp:d1"])
def test_a_run_without_servers_of_its_own_samples_from_those_that_run_already(given, load, monkeypatch):
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", "a:1,b:2")
    config, notes = load(FIVE_LINES, *filter(None, [given]))
    assert str(config.allocation) == "sglang:d2+fsdp:d1"
    said = "AREAL_LLM_SERVER_ADDRS names 2 servers, so allocation_mode=sglang:d2+fsdp:d1"
    assert (said in notes) == bool(given)


def test_a_replay_and_supervised_training_sample_from_no_server(load, monkeypatch):
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", "a:1")
    replay = ("allocation_mode=fsdp:d1", "debug.replay_rollout_data=true", "debug.path=record")
    assert str(load(FIVE_LINES, *replay)[0].allocation) == "fsdp:d1"
    sft = "actor: {path: some/model, optimizer: {lr: 1.0e-5}}\ntrain_dataset: {path: rows, type: sft}"
    assert str(load(sft, cls=SFTConfig)[0].allocation) == "fsdp:d1"


def test_servers_that_are_not_sampled_from_are_noted_and_another_number_is_refused(load, monkeypatch):
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", "a:1")
    _, notes = load(FIVE_LINES, "allocation_mode=embedded|fsdp:d1")
    [note] = [note for note in notes if "samples in the trainer's processes" in note]
    assert note.endswith("to sample from those servers give 'fsdp:d1'")
    with pytest.raises(ConfigError, match="names 1 inference servers and the allocation sglang"):
        load(FIVE_LINES, "allocation_mode=sglang:d2+fsdp:d1")


def test_rollouts_alone_need_neither_rows_nor_options_of_training(tmp_path):
    file = tmp_path / "rollout.yaml"
    file.write_text("actor: {path: some/model}\ngconfig: {max_new_tokens: 8}\n")
    config, _, notes = load_with_notes(["--config", str(file)], GRPOConfig, role="rollout")
    assert (str(config.allocation), config.actor.optimizer) == ("sglang:d1", None)
    assert notes == [
        "not given, so chosen: experiment_name=rollout, trial_name=trial0, allocation_mode=sglang:d1",
        "checked for rollouts alone: options of training may be missing and are not compared",
    ]
    with pytest.raises(ConfigError) as refused:
        load_with_notes(["--config", str(file)], GRPOConfig)
    assert "train_dataset.path must be given" in str(refused.value)


@pytest.mark.parametrize(
    ("servers", "path"),
    [
        ("allocation_mode: sglang:d2\nsglang: {model_path: some/model}", "some/model"),
        ("allocation_mode: vllm:d1\nvllm: {model: other/model}", "other/model"),
        (
            "sglang: {model_path: some/model}\nactor: {path: third/model}\nallocation_mode: sglang:d1",
            "third/model",
        ),
    ],
)
def test_rollouts_alone_need_no_more_than_the_section_of_their_servers(tmp_path, servers, path):
    file = tmp_path / "debug.yaml"
    file.write_text(servers)
    options = ["--config", str(file)]
    if "third" in path:
        options.append("sglang.model_path=third/model")
    config = load_with_notes(options, GRPOConfig, role="rollout")[0]
    assert config.actor.path == path
    assert config.allocation.train is None
