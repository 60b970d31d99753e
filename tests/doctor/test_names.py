"""Names of metrics: those that frameworks log, and those that only end like them."""

import pytest

from areal_debug.doctor.names import choose_names


@pytest.mark.parametrize(
    ("name", "quantity"),
    [
        ("no_eos_ratio", "no_eos"),
        ("no_eos_ratios/avg", "no_eos"),
        ("ppo_actor/no_eos_ratios/avg", "no_eos"),
        ("importance_weight", "importance_weight"),
        ("behave_imp_weight/avg", "behave_imp_weight"),
        ("task_reward", "reward"),
        ("task_reward/avg", "reward"),
        ("seq_len", "length"),
        ("objective/rlhf_reward", "reward"),
        ("actor/zero_advantage_frac", "zero_variance_groups"),
        ("my_env/reward/mean", "reward"),
        ("myEnv.meanReward", "reward"),
        ("reward_model/score", "reward"),
        ("trainer.grad_norm", "grad_norm"),
        ("trainer/gradNorm", "grad_norm"),
        ("Generation KL Error", "k3"),
        ("loss/policy_avg", "policy_loss"),
        ("kl/reference", "reference_kl"),
        ("response_length/clip_ratio", "no_eos"),
        ("rl/response/clipped_ratio", "no_eos"),
        ("losses/kl_loss", "reference_kl"),
        ("my/policy_entropy", "entropy"),
        ("training/off_policy/trajectory_staleness/mean", "staleness"),
        ("val-core/openai/gsm8k/acc/mean@8", "eval_reward"),
        ("eval/eval_gsm8k_pass1", "eval_reward"),
        ("eval/math/accuracy", "eval_reward"),
        ("eval_score", "eval_reward"),
        ("validation/loss", "eval_loss"),
        ("rollout/inference_logprob_diff", "logprob_difference"),
    ],
)
def test_a_quantity_is_known_by_the_words_that_its_name_ends_with(name, quantity):
    assert choose_names([name]) == {quantity: name}


@pytest.mark.parametrize(
    "name",
    [
        "critic/grad_norm",
        "draft_grad_norm",
        "critic_lr",
        "vf_clipfrac",
        "actor/pg_clipfrac_lower",
        "kl_coef",
        "max_reward",
        "response_length/max",
        "prompt_length/mean",
        "rewards/format_reward/mean",
        "val-aux/openai/gsm8k/reward/best@8/mean",
        "event_loop_lag/mean",
        "logprobs_diff",  # of OpenRLHF: policy against reference
        "advantages/mean",
    ],
)
def test_a_name_that_means_something_else_is_no_quantity(name):
    assert choose_names([name]) == {}
