"""Translation of option names of upstream's versions 0.4 to 2.0, each one reported."""

import pytest

from areal_core.config import GRPOConfig
from areal_core.config.loading import load_with_notes
from areal_core.config.upstream import translate_older_names
from areal_core.errors import ConfigError


def actor_of(**options):
    tree = {"actor": options}
    notes = translate_older_names(tree, GRPOConfig)
    return tree["actor"], notes


@pytest.mark.parametrize(
    ("mode", "level", "action"),
    [
        ("token_mask", "token", "mask"),
        ("token_truncate", "token", "clamp"),
        ("sequence_mask", "sequence", "mask"),
        ("sequence_truncate", "sequence", "clamp"),
    ],
)
def test_cap_and_mode_become_rejection_sampling(mode, level, action):
    actor, notes = actor_of(behave_imp_weight_cap=3.0, behave_imp_weight_mode=mode)
    expected = {"level": level, "action": action, "metric": "ratio", "upper": 3.0}
    assert actor == {"rejection_sampling": expected}
    assert "became actor.rejection_sampling" in notes[0]


def test_options_that_no_section_has_are_dropped_with_a_note_or_refused():
    tree = {
        "rollout": {"workers_ready_timeout": 60.0, "poll_interval": 5.0},
        "actor": {"optimizer_dtype": "fp32"},
    }
    notes = translate_older_names(tree, GRPOConfig)
    assert tree == {"rollout": {}, "actor": {}}
    assert notes == [
        "rollout.workers_ready_timeout is 60.0, which is not available: rollout.setup_timeout is how long servers "
        "may take to start"
    ]
    with pytest.raises(
        ConfigError, match=r"critic\.optimizer_dtype is 'bfloat16', which is not available: master"
    ):
        translate_older_names({"critic": {"optimizer_dtype": "bfloat16"}}, GRPOConfig)


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"rollout": {"openai": {"mode": "inline"}, "agent": {}}}, "rollout.openai is another name of rollout.agent, and both"),
        ({"rollout": {"admin_api_key": "a", "agent": {"admin_api_key": "b"}}}, "is another name of rollout.agent.admin_api_key, and both"),
        ({"actor": {"behave_imp_weight_cap": 2.0, "rejection_sampling": {}}}, "keep only the latter"),
        ({"teacher": {"engine_type": "ray"}}, "teacher.engine_type is 'ray'; expected rollout or train"),
        ({"actor": {"behave_imp_weight_mode": "rows"}}, "actor.behave_imp_weight_mode is 'rows'; expected one of"),
    ],
)  # fmt: skip
def test_values_that_never_existed_are_refused(tree, sentence):
    with pytest.raises(ConfigError) as error:
        translate_older_names(tree, GRPOConfig)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("teacher", "expected", "note"),
    [
        ({"engine_type": "rollout", "path": "t", "rollout": {"backend": "vllm:d1"}}, {"path": "t"}, "without servers of its own"),
        ({"engine_type": "train", "path": "t", "train": {"path": "u", "tp": 1}}, {"path": "t", "tp": 1}, "is called teacher"),
        ({"rollout": {"backend": "sglang:d1"}, "rl_loss_weight": 0.5}, {"rl_loss_weight": 0.5}, "ranks of the actor"),
    ],
)  # fmt: skip
def test_a_teacher_of_2_0_is_one_on_the_ranks_of_the_actor(teacher, expected, note):
    tree = {"teacher": teacher}
    [sentence] = translate_older_names(tree, GRPOConfig, is_override=True)
    assert tree == {"teacher": expected}
    assert note in sentence


FILE = """
train_dataset: {path: x, type: rl, batch_size: 8}
gconfig: {n_samples: 4, max_new_tokens: 64}
actor: {path: m, optimizer: {lr: 1.0e-5}, rejection_sampling: {level: sequence, action: clamp, upper: 9.0, lower: 0.5}}
"""


@pytest.mark.parametrize(
    ("override", "option", "value"),
    [
        ("actor.behave_imp_weight_cap=5", "rejection_sampling", ("sequence", "clamp", 5.0, 0.5)),
        ("actor.behave_imp_weight_mode=token_mask", "rejection_sampling", ("token", "mask", 9.0, 0.5)),
        ("actor.behave_imp_weight_mode=disabled", "rejection_sampling", None),
        ("actor.mb_spec.max_tokens_per_gpu=512", "mb_spec.max_tokens_per_mb", 512),
        ("actor.fsdp.ulysses_sp_size=1", "adv_norm", None),
    ],
)
def test_an_older_name_is_an_override_too_and_changes_nothing_else(tmp_path, override, option, value):
    file = tmp_path / "grpo.yaml"
    file.write_text(FILE)
    config, _, notes = load_with_notes(["--config", str(file), override], GRPOConfig)
    found = config.actor
    for part in option.split("."):
        found = getattr(found, part)
    if option == "rejection_sampling" and found is not None:
        found = (found.level, found.action, found.upper, found.lower)
    assert found == value
    assert config.train_dataset.type == "rl"
    if value is not None:
        assert any(override.partition("=")[0] in note for note in notes)
        assert (config.actor.adv_norm is None) == ("adv_norm" not in option)
