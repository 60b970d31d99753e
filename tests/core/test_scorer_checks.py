"""Constraints on the sections of a critic and a teacher, and files of upstream."""

import pytest

from areal_core.config import (
    NormConfig,
    OptimizerConfig,
    PPOActorConfig,
    PPOConfig,
    PPOCriticConfig,
    TeacherConfig,
    check_config,
)
from areal_core.errors import ConfigError


def make_config(**sections) -> PPOConfig:
    """Build a valid config: four prompts of two samples on one rank."""
    config = PPOConfig(experiment_name="a", trial_name="b", allocation_mode="embedded|fsdp:d1", **sections)
    config.actor = PPOActorConfig(path="m", optimizer=OptimizerConfig(), kl_ctl=0.0)
    config.train_dataset.path, config.train_dataset.type, config.train_dataset.batch_size = "data", "rl", 4
    config.gconfig.n_samples, config.rollout.consumer_batch_size = 2, 4
    return config


def critic(**options) -> PPOCriticConfig:
    return PPOCriticConfig(**{"path": "m", "optimizer": OptimizerConfig()} | options)


def teacher(**options) -> TeacherConfig:
    return TeacherConfig(**{"path": "t"} | options)


def refusal(config: PPOConfig) -> str:
    with pytest.raises(ConfigError) as refused:
        check_config(config)
    return str(refused.value)


def test_a_critic_and_a_teacher_pass():
    assert check_config(make_config(critic=critic(is_critic=True), teacher=teacher())) == []
    assert check_config(make_config(teacher=teacher(rl_loss_weight=0.0, distill_loss_weight=1.0))) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"path": ""}, "critic.path is empty"),
        ({"optimizer": None}, "critic.optimizer is None; values would never be learned"),
        ({"optimizer": OptimizerConfig(gradient_clipping=0.0)}, "critic.optimizer.gradient_clipping is 0.0; expected above 0"),
        ({"eps_clip": 0.0}, "critic.eps_clip is 0.0; expected above 0"),
        ({"ppo_n_minibatches": 9}, "critic.ppo_n_minibatches is 9 and each rank has 8 sequences"),
        ({"mask_no_eos_with_zero": True}, "critic.mask_no_eos_with_zero is True and actor.mask_no_eos_with_zero is False"),
    ],
)  # fmt: skip
def test_a_critic_that_could_not_learn_is_refused(options, sentence):
    assert sentence in refusal(make_config(critic=critic(**options)))


def test_rewards_relative_to_their_group_leave_a_critic_nothing():
    config = make_config(critic=critic())
    config.actor.reward_norm = NormConfig("group", std_level=None, group_size=2)
    assert "actor.reward_norm.mean_level is 'group'; critic is given" in refusal(config)
    config.actor.reward_norm.mean_level = "batch"
    assert check_config(config) == []


def test_sequences_fit_into_the_micro_batches_of_every_model():
    config = make_config(critic=critic(), teacher=teacher())
    config.gconfig.max_new_tokens, config.train_dataset.max_length = 64, 32
    config.critic.mb_spec.max_tokens_per_mb = config.teacher.mb_spec.max_tokens_per_mb = 95
    sentence = refusal(config)
    assert "critic.mb_spec.max_tokens_per_mb is 95" in sentence
    assert "teacher.mb_spec.max_tokens_per_mb is 95" in sentence


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"path": ""}, "teacher.path is empty"),
        ({"temperature": 0.7}, "teacher.temperature is 0.7 and actor.temperature is 1.0"),
        ({"rl_loss_weight": -1.0}, "teacher.rl_loss_weight is -1.0"),
        ({"distill_loss_weight": 0.0}, "teacher.distill_loss_weight is 0.0; expected above 0"),
    ],
)
def test_a_teacher_that_could_not_teach_is_refused(options, sentence):
    assert sentence in refusal(make_config(teacher=teacher(**options)))


@pytest.mark.parametrize(("name", "value"), [("discount", 1.5), ("gae_lambda", -0.1)])
def test_gae_is_bounded(name, value):
    config = make_config()
    setattr(config.actor, name, value)
    assert f"actor.{name} is {value}; expected 0 to 1" in refusal(config)
