"""A preset sets its options and no others, yields to explicit options, and prints what it sets."""

from dataclasses import replace
from pathlib import Path

from areal_core.config import GRPOConfig, NormConfig, PPOActorConfig, load_expr_config
from areal_core.config.checks import flat_values
from areal_core.config.presets import PRESETS, RESET, shown

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/gsm8k_grpo.yaml"


def load(*overrides, file=EXAMPLE):
    return load_expr_config(["--config", str(file), *overrides], GRPOConfig)[0]


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


def test_the_document_has_the_table_of_the_presets():
    document = (ROOT / "docs/algorithms.md").read_text()
    for name, options in PRESETS.items():
        listed = ", ".join(f"`{option}={shown(value)}`" for option, value in options.items())
        assert f"| `{name}` | {listed} |" in document, f"| `{name}` | {listed} |"
