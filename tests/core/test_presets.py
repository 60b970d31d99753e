"""A preset sets its options and no others, yields to explicit options, and prints what it sets."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from areal_core.config import GRPOConfig, NormConfig, PPOActorConfig, SFTConfig, load_expr_config
from areal_core.config.checks import flat_values
from areal_core.config.presets import MODELS, PRESETS, RESET, shown
from areal_core.errors import ConfigError

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/gsm8k_grpo.yaml"


def load(*overrides, file=EXAMPLE):
    return load_expr_config(["--config", str(file), *overrides], GRPOConfig)[0]


def plain_values(config):
    """Return the options that are no sections."""
    return {name: value for name, value in flat_values(config).items() if not hasattr(value, "__dict__")}


@cache
def without_preset():
    return plain_values(load())


def resolved(option, value, config):
    """Resolve the value of a preset in a config."""
    referred = re.fullmatch(r"\$\{(.*)\}", value) if isinstance(value, str) else None
    return flat_values(config)[referred[1]] if referred else value


@pytest.mark.parametrize("name", PRESETS)
def test_preset_sets_exactly_its_options(name):
    own = ["teacher.path=teacher"] * (name == "distill")  # which no preset can know
    before, config = without_preset(), load(f"algorithm={name}", *own)
    after = flat_values(config)
    for option, value in PRESETS[name].items():
        assert after[option] == resolved(option, value, config), option
    changed = {option for option, value in plain_values(config).items() if before.get(option) != value}
    strange = {
        option
        for option in changed
        if not any(f"{option}.".startswith(f"{preset}.") for preset in PRESETS[name])
        and option.partition(".")[0] not in MODELS  # a new section has its defaults
    }
    assert strange == set()


def test_presets_follow_other_options():
    assert load("algorithm=rloo").actor.reward_norm == NormConfig(
        "group", mean_leave1out=True, std_level=None, group_size=4
    )
    assert load("algorithm=reinforce_pp").ref.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert load("algorithm=dr_grpo_paper", "gconfig.max_new_tokens=77").actor.max_new_tokens == 77
    ppo = load("algorithm=ppo")
    assert (ppo.actor.reward_norm, ppo.critic.path, ppo.critic.eps_clip) == (None, ppo.actor.path, 0.5)
    assert ppo.critic.optimizer == ppo.actor.optimizer
    assert load("algorithm=ppo", "critic.optimizer.lr=1e-6").critic.optimizer == replace(
        ppo.actor.optimizer, lr=1e-6
    )
    distilled = load("algorithm=distill", "teacher.path=large", "teacher.rl_loss_weight=0")
    assert (distilled.teacher.path, distilled.teacher.rl_loss_weight) == ("large", 0.0)


def test_other_overrides_win_and_are_reported(caplog):
    config = load("algorithm=dapo", "actor.eps_clip_higher=0.3", "~actor.kl_ctl", "actor.kl_ctl=0.0")
    assert config.actor.eps_clip_higher == 0.3
    assert config.actor.eps_clip == 0.2
    (line,) = caplog.messages
    assert line.startswith(f"{EXAMPLE}: algorithm=dapo sets ")
    assert "actor.eps_clip=0.2" in line
    assert "actor.dynamic_sampling=true" in line
    assert "actor.eps_clip_higher=" not in line
    assert line.endswith("; your own actor.kl_ctl, actor.eps_clip_higher stay")


def test_a_section_of_the_command_line_replaces_that_of_the_preset():
    norm = load(
        "algorithm=dr_grpo", "actor.reward_norm={mean_level: batch, std_level: batch}"
    ).actor.reward_norm
    assert norm == NormConfig("batch", std_level="batch", group_size=4)
    assert load("algorithm=dr_grpo", "actor.reward_norm=null").actor.reward_norm is None


def test_in_a_file_the_options_of_the_file_win(tmp_path, caplog):
    file = tmp_path / "own.yaml"
    file.write_text("algorithm: dapo\n" + EXAMPLE.read_text())
    config = load(file=file)
    assert config.actor.eps_clip == 0.4  # of the file
    assert config.actor.eps_clip_higher == 0.28  # of the preset
    assert "your own actor.reward_norm.mean_level, " in caplog.text
    gspo = load("algorithm=gspo", file=file)  # the command line overrides the file
    assert gspo.actor.importance_sampling_level == "sequence"
    assert gspo.actor.eps_clip_higher is None
    assert load("~algorithm", file=file).actor.eps_clip_higher is None


def test_nothing_is_left_over_from_the_algorithm_that_a_file_was_written_for(tmp_path, caplog):
    file = tmp_path / "own.yaml"
    sapo = "actor:\n  use_sapo_loss: true\n  m2_threshold: null\n"
    text = EXAMPLE.read_text().replace("use_decoupled_loss: true", "use_decoupled_loss: false")
    file.write_text(text.replace("actor:\n", sapo))
    assert load(file=file).actor.use_sapo_loss
    assert load("algorithm=gspo", file=file).actor.use_sapo_loss is False
    assert "actor.use_sapo_loss=false" in caplog.text
    actor = PPOActorConfig(reward_norm=NormConfig(), adv_norm=NormConfig())
    defaults = flat_values(GRPOConfig(actor=actor))
    assert {option: defaults[option] for option in RESET} == RESET


def test_a_critic_stays_with_the_algorithm_that_has_one(tmp_path, caplog):
    file = ROOT / "examples/ppo.yaml"
    assert load(file=file).critic.gradient_checkpointing
    assert load("algorithm=ppo", file=file).critic == load(file=file).critic
    assert load("algorithm=grpo", file=file).critic is None
    assert "critic=null" in caplog.messages[-1]
    with_teacher = load("algorithm=distill", "teacher.path=large", file=file)
    assert (with_teacher.critic, with_teacher.teacher.distill_loss_weight) == (None, 0.005)


def test_an_existing_reference_is_not_changed(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(EXAMPLE.read_text() + "\nref: {path: other/model, dtype: float32}\n")
    config = load("algorithm=reinforce_pp", file=file)
    assert (config.ref.path, config.ref.dtype) == ("other/model", "float32")


def test_an_unknown_name_is_refused_with_those_that_are_known():
    with pytest.raises(
        ConfigError, match=r"algorithm is 'gropo'; expected one of grpo, ppo, dr_grpo, rloo, "
    ):
        load("algorithm=gropo")


def test_other_methods_have_no_algorithm(tmp_path):
    (tmp_path / "sft.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match="unknown option 'algorithm'"):
        load_expr_config(["--config", str(tmp_path / "sft.yaml"), "algorithm=grpo"], SFTConfig)


def test_the_document_has_the_table_of_the_presets():
    document = (ROOT / "docs/algorithms.md").read_text()
    for name, options in PRESETS.items():
        listed = ", ".join(f"`{option}={shown(value)}`" for option, value in options.items())
        assert f"| `{name}` | {listed} |" in document, f"| `{name}` | {listed} |"
