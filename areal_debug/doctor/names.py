"""The names under which each framework logs a quantity. The first pattern that matches is used.

Names begin without `train/`, which loggers add. Those of `record/` are computed from the rows of a
record (`areal_debug.doctor.rows`), for quantities that its trainer did not log. A quantity without
such a name is searched for by the words that its name ends with (`words.py`).
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatch

from areal_debug.doctor.words import by_words

NAMES: dict[str, tuple[str, ...]] = {
    "reward": (
        "*_actor/task_reward/avg",
        "rollout/reward/avg",
        "rollout/reward",
        "critic/rewards/mean",
        "critic/score/mean",
        "reward",
        "rollout/raw_reward",
        "reward/avg_raw_reward",
        "agg/effective/*/reward/mean",
        "reward/mean",
        "record/reward",
    ),
    "eval_reward": (
        "eval-rollout/reward/avg",
        "eval-rollout/reward",
        "val-core/*/mean@*",
        "val/test_score/*",
        "eval/reward",
        "eval_reward",
        "eval/accuracy",
        "eval/all/avg_score",
        "eval/*/avg@*",
        "validation/accuracy",
    ),
    "importance_weight": (
        "*_actor/update/importance_weight/avg",
        "val/ratio",
        "probs_ratio",
    ),
    "behave_imp_weight": (
        "*_actor/update/behave_imp_weight/avg",
        "rollout_corr/rollout_is_mean",
        "sampling/importance_sampling_ratio/mean",
        "tis",
        "policy/loss_metrics/is_ratio_mean",
        "sampling_importance_ratio",
    ),
    "clip_ratio": (
        "*_actor/update/clip_ratio/avg",
        "actor/pg_clipfrac",
        "clip_ratio/region_mean",
        "policy/clipfrac_avg",
        "clip_ratio",
        "pg_clipfrac",
        "policy/loss_metrics/clip_ratio",
        "policy/ppo_clip_ratio",
    ),
    "approx_kl": (
        "*_actor/update/approx_kl/avg",
        "actor/ppo_kl",
        "policy/approxkl_avg",
        "approx_kl",
        "ppo_kl",
    ),
    "behave_kl": ("*_actor/update/behave_approx_kl/avg",),
    "reference_kl": (
        "*_actor/update/kl_loss/avg",
        "actor/kl_loss",
        "objective/kl",
        "kl",
        "kl_loss",
        "policy/policy_kl",
        "kl_penalty",
    ),
    "entropy": (
        "*_actor/update/entropy/avg",
        "actor/entropy",
        "actor/entropy_loss",
        "policy/entropy_avg",
        "entropy",
        "entropy_loss",
        "policy/policy_entropy",
        "entropy/all/mean",
        "approx_entropy",
    ),
    "grad_norm": (
        "*_actor/update/grad_norm",
        "actor/grad_norm",
        "grad_norm",
        "optim/grad_norm",
        "policy/raw_grad_norm",
    ),
    "length": (
        "*_actor/seq_len/avg",
        "response_length/mean",
        "completions/mean_length",
        "completion_length",
        "rollout/response_len/mean",
        "generate/avg_num_tokens",
        "agg/effective/num_output_tokens/mean",
        "mean_gen_tokens_per_sample",
        "record/length",
    ),
    "no_eos": (
        "*_actor/no_eos_ratios/avg",
        "response_length/clip_ratio",
        "completions/clipped_ratio",
        "rollout/truncated_ratio",
        "agg/effective/*/is_truncated/mean",
        "truncation_rate",
        "record/no_eos",
    ),
    "zero_variance_groups": (
        "*_actor/zero_variance_groups",
        "frac_reward_zero_std",
        "*zero_var*group*",
        "record/zero_variance_groups",
    ),
    "staleness": (
        "*/version_stats/head_offpolicyness/avg",
        "*/version_stats/sample_staleness_proximal*avg",
        "async/staleness_mean",
        "off_policy/mean",
        "record/staleness",
    ),
    "logprob_difference": (
        "consistency/mean_abs",
        "train_rollout_logprob_abs_diff",
        "training/rollout_probs_diff_mean",
        "sampling/sampling_logp_difference/mean",
        "policy/rollout_train_logprobs_abs_diff_mean",
        "record/logprob_difference",
    ),
    "k3": (
        "consistency/k3",
        "rollout_corr/k3_kl",
        "mismatch_kl",
        "gen_kl_error",
        "train_rollout_kl",
        "mismatch_kl/all/mean",
        "record/k3",
    ),
    "effective_samples": ("rollout_corr/rollout_is_eff_sample_size", "ess_ratio"),
    "filtered": ("*_actor/update/rs_filtered_fraction", "rollout_corr/rollout_rs_masked_fraction"),
    "lr": (
        "*_actor/update/lr",
        "actor/lr",
        "learning_rate",
        "optim/lr",
        "policy/policy_lr",
        "lr",
        "lr-pg_0",
    ),
    "update_successful": ("*_actor/update/update_successful",),
    "explained_variance": (
        "*critic*/explained_variance",
        "critic/vf_explained_var",
        "*explained_var*",
    ),
    "failed": ("rollout/failed",),
    "accepted": ("rollout/accepted",),
    "policy_loss": (
        "*_actor/update/actor_loss/avg",
        "*_actor/update/loss",
        "actor/pg_loss",
        "pg_loss",
        "policy/policy_loss",
    ),
    "loss": (
        "sft/loss/avg",
        "dpo/loss/avg",
        "rw/loss/avg",
        "loss",
        "loss/mean",
    ),
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
    "rejected_reward": ("dpo/rejected_reward/avg", "rewards/rejected"),
    "generated_reward": ("rollout/reward/avg", "rollout/reward"),
    "reward_std": ("reward_std", "reward/std", "critic/rewards/std", "critic/score/std"),
    "reward_max": ("critic/rewards/max", "critic/score/max", "reward/max", "reward_max"),
    "reward_min": ("critic/rewards/min", "critic/score/min", "reward/min", "reward_min"),
    "advantage_std": ("*advantage*/std", "*advantage*_std", "adv_std"),
    "advantage_max": ("critic/advantages/max", "*advantage*/max"),
    "advantage_min": ("critic/advantages/min", "*advantage*/min"),
    "solved_groups": ("*solve_all*", "*all_correct*"),
    "failed_groups": ("*solve_none*", "*all_wrong*"),
    "repetition": ("*repetition*",),
    "value_loss": (
        "*_critic/critic_loss/avg",
        "critic/vf_loss",
        "loss/value_avg",
        "*critic/update/loss*",
        "value_loss",
    ),
    "step_time": (
        "timing_s/step",
        "timeperf/step",
        "perf/time_per_step",
        "step_time",
        "step_time_s",
        "time/step",
        "perf/step_time",
        "timing/train/total_step_time",
    ),
    "host_memory": ("perf/cpu_memory_used_gb", "*rss*", "*host_memory*", "*cpu_memory*"),
    "device_memory": ("perf/max_memory_allocated_gb", "*memory_allocated*", "*gpu_memory*"),
}

FAMILIES = {
    "*_actor/": "AReaL",
    "sft/": "AReaL",
    "dpo/": "AReaL",
    "rw/": "AReaL",
    "rollout/raw_reward": "slime",
    "train_rollout_logprob_abs_diff": "slime",
    "ppo_clip_ratio": "OpenRLHF",
    "vllm_kl": "OpenRLHF",
    "actor_grad_norm": "OpenRLHF",
    "critic/": "verl",
    "actor/": "verl",
    "reward/avg_raw_reward": "SkyRL",
    "policy/policy_": "SkyRL",
    "mismatch_kl/": "prime-rl",
    "optim/grad_norm": "prime-rl",
    "gen_kl_error": "NeMo-RL",
    "mean_gen_tokens_per_sample": "NeMo-RL",
    "completions/": "TRL",
    "rewards/": "TRL",
    "mean_token_accuracy": "TRL",
    "rollout/": "AReaL",
}


SLIME = ("rollout/raw_reward", "train_rollout_logprob_abs_diff")
NOT_A_DATASET = ("*ratio*", "*_len*", "*-pass*", "*step", "*/*/*")


def choose_names(names: Sequence[str]) -> dict[str, str]:
    """Return the name under which a run logs each quantity, of those that it logs."""
    exact = {quantity: find_name(quantity, names) for quantity in NAMES}
    chosen = {quantity: name for quantity, name in exact.items() if name is not None}
    if "eval_reward" not in chosen and any(name in names for name in SLIME):
        # slime and miles log the reward of a data set under its own name
        sets = [name for name in names if fnmatch(name, "eval/*") and not matches(name, NOT_A_DATASET)]
        chosen |= dict(zip(("eval_reward",), sets, strict=False))
    free = [name for name in names if name not in chosen.values()]
    return by_words(free) | chosen


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name has any of the patterns."""
    return any(fnmatch(name, pattern) for pattern in patterns)


def find_name(quantity: str, names: Sequence[str]) -> str | None:
    """Return the first of a run's names that a framework logs a quantity under, or None."""
    for pattern in NAMES[quantity]:
        for name in names:
            if fnmatch(name, pattern):
                return name
    return None


def family_of(names: Sequence[str]) -> str:
    """Return the framework whose names these are, or "unknown"."""
    for pattern, family in FAMILIES.items():
        if any(fnmatch(name, pattern + "*") for name in names):
            return family
    return "unknown"
