"""The names under which each framework logs a quantity. The first pattern that matches is used."""

from fnmatch import fnmatch

NAMES: dict[str, tuple[str, ...]] = {
    "reward": (
        "*_actor/task_reward/avg",
        "rollout/reward/avg",
        "rollout/reward",
        "critic/rewards/mean",
        "critic/score/mean",
        "reward",
    ),
    "eval_reward": (
        "eval-rollout/reward/avg",
        "eval-rollout/reward",
        "val-core/*/mean@*",
        "val/test_score/*",
        "eval/reward",
        "eval_reward",
    ),
    "importance_weight": ("*_actor/update/importance_weight/avg", "val/ratio"),
    "behave_imp_weight": (
        "*_actor/update/behave_imp_weight/avg",
        "rollout_corr/rollout_is_mean",
        "sampling/importance_sampling_ratio/mean",
    ),
    "clip_ratio": (
        "*_actor/update/clip_ratio/avg",
        "actor/pg_clipfrac",
        "clip_ratio/region_mean",
        "policy/clipfrac_avg",
    ),
    "approx_kl": ("*_actor/update/approx_kl/avg", "actor/ppo_kl", "policy/approxkl_avg", "approx_kl"),
    "reference_kl": ("actor/kl_loss", "objective/kl", "kl"),
    "entropy": (
        "*_actor/update/entropy/avg",
        "actor/entropy",
        "actor/entropy_loss",
        "policy/entropy_avg",
        "entropy",
    ),
    "grad_norm": ("*_actor/update/grad_norm", "actor/grad_norm", "grad_norm", "*/grad_norm"),
    "length": (
        "*_actor/seq_len/avg",
        "response_length/mean",
        "completions/mean_length",
        "completion_length",
    ),
    "no_eos": ("*_actor/no_eos_ratios/avg", "response_length/clip_ratio", "completions/clipped_ratio"),
    "zero_variance_groups": ("*_actor/zero_variance_groups", "frac_reward_zero_std"),
    "staleness": ("*/version_stats/head_offpolicyness/avg", "*/version_stats/sample_staleness_proximal*avg"),
    "logprob_difference": (
        "consistency/mean_abs",
        "train_rollout_logprob_abs_diff",
        "training/rollout_probs_diff_mean",
        "sampling/sampling_logp_difference/mean",
    ),
    "k3": ("consistency/k3", "rollout_corr/k3_kl", "mismatch_kl", "gen_kl_error", "train_rollout_kl"),
    "effective_samples": ("rollout_corr/rollout_is_eff_sample_size", "ess_ratio"),
    "filtered": ("*_actor/update/rs_filtered_fraction", "rollout_corr/rollout_rs_masked_fraction"),
    "lr": ("*_actor/update/lr", "actor/lr", "learning_rate", "*/lr"),
    "update_successful": ("*_actor/update/update_successful",),
    "explained_variance": ("*critic*/explained_variance", "critic/vf_explained_var"),
    "failed": ("rollout/failed",),
    "accepted": ("rollout/accepted",),
    "policy_loss": ("*_actor/update/actor_loss/avg", "actor/pg_loss"),
    "loss": ("sft/loss/avg", "dpo/loss/avg", "rw/loss/avg", "loss"),
    "eval_loss": (
        "eval-sft/loss/avg",
        "eval-dpo/loss/avg",
        "eval-rw/loss/avg",
        "val/loss",
        "eval_loss",
        "eval/loss",
    ),
    "preference_accuracy": (
        "dpo/reward_accuracy/avg",
        "rw/correct_ratio/avg",
        "rewards/accuracies",
        "accuracy",
    ),
    "chosen_reward": ("dpo/chosen_reward/avg", "rewards/chosen"),
}

FAMILIES = {
    "*_actor/": "AReaL",
    "rollout/": "AReaL",
    "sft/": "AReaL",
    "dpo/": "AReaL",
    "rw/": "AReaL",
    "critic/": "verl",
    "actor/": "verl",
    "completions/": "TRL",
    "rewards/": "TRL",
    "mean_token_accuracy": "TRL",
}


def find_name(quantity: str, names: list[str]) -> str | None:
    """Return the name under which a run logs a quantity, or None."""
    for pattern in NAMES[quantity]:
        for name in names:
            if fnmatch(name, pattern):
                return name
    return None


def family_of(names: list[str]) -> str:
    """Return the framework whose names these are, or "unknown"."""
    for pattern, family in FAMILIES.items():
        if any(fnmatch(name, pattern + "*") for name in names):
            return family
    return "unknown"
