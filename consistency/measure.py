"""Metrics of the mismatch of trainer and engine: float64, over compared tokens only, no padding.

The sign is always D = trainer - engine, rho = exp(D). The metrics are those of the field (k1, k2,
k3: J. Schulman, "Approximating KL divergence", 2020; effective sample size: Kong, 1992); `ALIASES`
maps them to the names under which training frameworks log them.
"""

from dataclasses import dataclass

import numpy as np

from consistency.estimators import LARGEST_EXPONENT, correlation, effective_share, k3, ratio
from consistency.groups import Group, all_groups, histogram
from consistency.tokens import Excluded, Floats, Ints, TokenTable

# A sequence's ratio is bounded as in verl's rollout correction, so that both chi2 are comparable.
SEQUENCE_BOUND = 20.0
IDENTITY_TOLERANCE = 1e-9
# Below the float32 resolution of a logprob, a median counts as 0 in ratios.
SMALLEST_SIZE = 1e-12

ALIASES = {
    "mean_abs": (
        "slime: train_rollout_logprob_abs_diff",
        "AReaL: logp_abs_diff",
        "SkyRL: rollout_train_logprobs_abs_diff_mean",
    ),
    "k1": ("verl: kl", "OpenRLHF: vllm_kl", "tinker: kl_sample_train_v1"),
    "k2": ("tinker: kl_sample_train_v2",),
    "k3": (
        "verl: k3_kl",
        "NeMo-RL: gen_kl_error",
        "prime-rl: mismatch_kl",
        "miles: train_rollout_kl",
        "AReaL: rollout_train_k3_kl",
    ),
    "reverse_k3": ("NeMo-RL: policy_kl_error",),
    "ratio_mean": (
        "NeMo-RL: sampling_importance_ratio",
        "TRL: sampling/importance_sampling_ratio/mean (before its cap)",
    ),
    "mult_prob_error_mean": ("NeMo-RL: token_mult_prob_error",),
    "jsd": ("NeMo-RL: js_divergence_error",),
    "prob_diff_mean": ("verl: rollout_probs_diff_mean", "tunix: sampler_trainer/prob_diff_mean"),
    "prob_pearson": ("verl: rollout_probs_pearson_corr", "tunix: sampler_trainer/probs_pearson_corr"),
    "chi2_token": ("verl: chi2_token",),
    "chi2_sequence": ("verl: chi2_seq",),
    "log_ppl_diff": ("verl: log_ppl_diff", "xtuner: mismatch/log_ppl_diff"),
    "ess_token": ("miles: ess_ratio",),
    "share_above_ln2": ("AReaL: rollout_train_extreme_frac_tau2",),
}


@dataclass(frozen=True)
class Identity:
    """Two computations of the same number; if they differ, the report itself is wrong."""

    name: str
    left: float
    right: float

    @property
    def holds(self) -> bool:
        """True if both are equal up to float64 rounding."""
        scale = max(1.0, abs(self.left), abs(self.right))
        return not np.isfinite(scale) or abs(self.left - self.right) <= IDENTITY_TOLERANCE * scale


@dataclass(frozen=True)
class Measurement:
    """All metrics of one comparison.

    `by` holds groups per column; in curves, the key of a `Group` is the first position of its bin.
    """

    num_tokens: int
    num_sequences: int
    excluded: Excluded
    metrics: dict[str, float]
    identities: tuple[Identity, ...]
    by: dict[str, tuple[Group, ...]]
    histogram: tuple[tuple[float, int], ...]


def measure(table: TokenTable) -> Measurement:
    """Compute all metrics; takes about 2 s for a million tokens."""
    difference = table.difference
    sequence = Sums.of(table)
    metrics = {
        **sizes(difference),
        **bias(difference, sequence),
        **divergences(table),
        **ratios(difference),
        **probabilities(table),
        **sequence_ratios(sequence),
        **tail(difference),
        **against_surprisal(table),
    }
    # A dot product, so that the identity does not repeat the sums it checks.
    mean_ratio = float(ratio(difference) @ np.full(len(difference), 1 / len(difference)))
    identities = (
        Identity("k3 = k1 + mean(rho) - 1", metrics["k3"], metrics["k1"] + mean_ratio - 1),
        Identity(
            "k1 = log_ppl_diff weighted by length",
            metrics["k1"],
            -float(sequence.total.sum() / sequence.count.sum()),
        ),
        Identity("rmse^2 = 2 k2", metrics["rmse"] ** 2, 2 * metrics["k2"]),
        Identity(
            "ess = 1 / (1 + var / mean^2)",
            metrics["ess_token"],
            1 / (1 + (metrics["ratio_std"] / metrics["ratio_mean"]) ** 2),
        ),
    )
    return Measurement(
        num_tokens=len(difference),
        num_sequences=len(sequence.count),
        excluded=table.excluded,
        metrics=metrics,
        identities=identities,
        by=all_groups(table),
        histogram=histogram(difference),
    )


@dataclass(frozen=True)
class Sums:
    """Per sequence, [n]: number of tokens, sum of D, maximum of |D|, sums of both logprobs."""

    count: Floats
    total: Floats
    largest: Floats
    trainer: Floats
    engine: Floats

    @classmethod
    def of(cls, table: TokenTable) -> "Sums":
        """Sum over the sequences that have compared tokens."""
        difference = table.difference
        _, inverse = np.unique(table.sequence, return_inverse=True)
        count = np.bincount(inverse).astype(np.float64)
        largest = np.zeros(len(count))
        np.maximum.at(largest, inverse, np.abs(difference))

        def by_sequence(values: Floats) -> Floats:
            return np.bincount(inverse, weights=values).astype(np.float64)

        return cls(
            count, by_sequence(difference), largest, by_sequence(table.trainer), by_sequence(table.engine)
        )


def sizes(difference: Floats) -> dict[str, float]:
    """Quantiles of |D|, root mean square, shares of signs."""
    size = np.abs(difference)
    p50, p95, p99 = np.quantile(size, [0.5, 0.95, 0.99])
    return {
        "mean_abs": float(size.mean()),
        "p50_abs": float(p50),
        "p95_abs": float(p95),
        "p99_abs": float(p99),
        "max_abs": float(size.max()),
        "rmse": float(np.sqrt(np.mean(difference**2))),
        "share_positive": float(np.mean(difference > 0)),
        "share_zero": float(np.mean(difference == 0)),
    }


def bias(difference: Floats, sequence: Sums) -> dict[str, float]:
    """Mean of D and its t-statistic, clustered by sequence (its tokens are not independent)."""
    mean = float(difference.mean())
    residual = sequence.total - mean * sequence.count
    clusters = len(residual)
    error = np.sqrt((residual**2).sum() * clusters / max(clusters - 1, 1)) / sequence.count.sum()
    return {
        "mean": mean,
        "std": float(difference.std()),
        "t_clustered": float(mean / error) if clusters > 1 and error > 0 else 0.0,
    }


def divergences(table: TokenTable) -> dict[str, float]:
    """Three estimators of KL(engine || trainer), the reverse KL, two-point JS divergence."""
    difference = table.difference
    middle = np.logaddexp(table.trainer, table.engine) - np.log(2.0)
    return {
        "k1": float(-difference.mean()),
        "k2": float(0.5 * np.mean(difference**2)),
        "k3": float(k3(difference).mean()),
        "reverse_k3": float(k3(-difference).mean()),
        "jsd": float(0.5 * (k3(table.trainer - middle) + k3(table.engine - middle)).mean()),
    }


def ratios(difference: Floats) -> dict[str, float]:
    """Importance ratios without any cap."""
    rho, size = ratio(difference), np.abs(difference)
    multiple = ratio(size)
    p01, p99 = np.quantile(rho, [0.01, 0.99])
    return {
        "chi2_token": float(np.mean(rho**2) - 1),
        "ess_token": effective_share(np.minimum(difference, LARGEST_EXPONENT)),
        "ratio_mean": float(rho.mean()),
        "ratio_std": float(rho.std()),
        "ratio_min": float(rho.min()),
        "ratio_max": float(rho.max()),
        "ratio_p01": float(p01),
        "ratio_p99": float(p99),
        "share_outside_eps_0.2": float(np.mean((rho < 0.8) | (rho > 1.2))),
        "share_outside_0.5_2": float(np.mean((rho < 0.5) | (rho > 2))),
        "share_outside_0.5_5": float(np.mean((rho < 0.5) | (rho > 5))),
        "share_above_ln2": float(np.mean(size > np.log(2))),
        "share_catastrophic": float(np.mean(rho < 1e-4)),
        "mult_prob_error_mean": float(multiple.mean()),
        "mult_prob_error_p50": float(np.median(multiple)),
    }


def probabilities(table: TokenTable) -> dict[str, float]:
    """Differences of probabilities (insensitive to unlikely tokens), correlations, perplexities."""
    trainer, engine = np.exp(table.trainer), np.exp(table.engine)
    size = np.abs(trainer - engine)
    return {
        "prob_diff_mean": float(size.mean()),
        "prob_diff_std": float(size.std()),
        "prob_diff_max": float(size.max()),
        "prob_pearson": correlation(trainer, engine),
        "logprob_pearson": correlation(table.trainer, table.engine),
        "ppl_trainer": float(np.exp(-table.trainer.mean())),
        "ppl_engine": float(np.exp(-table.engine.mean())),
    }


def sequence_ratios(sequence: Sums) -> dict[str, float]:
    """Sequence ratios, the products of token ratios, and their correlation with length."""
    total, mean = sequence.total, sequence.total / sequence.count
    bounded = np.clip(total, -SEQUENCE_BOUND, SEQUENCE_BOUND)
    return {
        "chi2_sequence": float(np.exp(2 * bounded).mean() - 1),
        "ess_sequence": effective_share(total),
        "sequence_ratio_mean": float(np.exp(bounded).mean()),
        "sequence_max_abs_mean": float(sequence.largest.mean()),
        "geometric_ratio_mean": float(ratio(mean).mean()),
        "log_ppl_diff": float(-mean.mean()),
        "ppl_ratio": float(ratio(-mean).mean()),
        "length_correlation": correlation(np.abs(total), sequence.count),
    }


def tail(difference: Floats) -> dict[str, float]:
    """Kurtosis (3 if normal), p99 over median, and the share of sum |D| in 1 % of the tokens."""
    size = np.sort(np.abs(difference))
    centred = difference - difference.mean()
    variance, median, total = float(np.mean(centred**2)), float(np.median(size)), float(size.sum())
    top = size[-max(1, len(size) // 100) :]
    return {
        "kurtosis": float(np.mean((centred / np.sqrt(variance)) ** 4))
        if variance > SMALLEST_SIZE**2
        else 0.0,
        "p99_over_p50": float(np.quantile(size, 0.99) / median) if median > SMALLEST_SIZE else 0.0,
        "top_percent_share": float(top.sum() / total) if total > 0 else 0.0,
    }


def against_surprisal(table: TokenTable) -> dict[str, float]:
    """Correlation of D and |D| with surprisal: large for a temperature, small for kernel noise."""
    surprisal = -table.trainer
    return {
        "surprisal_correlation": correlation(table.difference, surprisal),
        "surprisal_abs_correlation": correlation(np.abs(table.difference), surprisal),
    }


def worst_tokens(table: TokenTable, count: int = 10) -> Ints:
    """Return the rows of the table with the largest |D|, largest first; int64 [count]."""
    return np.argsort(-np.abs(table.difference), kind="stable")[:count]
