"""Metrics of the mismatch of trainer and engine: float64, over compared tokens only, no padding.

The sign is always D = trainer - engine, rho = exp(D). The metrics are those of the field (k1, k2,
k3: J. Schulman, "Approximating KL divergence", 2020; effective sample size: Kong, 1992); `ALIASES`
maps them to the names under which training frameworks log them.

Groups locate a mismatch: by position, turn, version, every other recorded column, and token id.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from consistency.tokens import Excluded, Floats, Ints, TokenTable

LARGEST_EXPONENT = 700.0  # exp() overflows at 709.8

NUM_BINS = 40

# A sequence's ratio is bounded as in verl's rollout correction, so that both chi2 are comparable.
SEQUENCE_BOUND = 20.0
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
class Noise:
    """Noise floor of a precision: the largest published healthy difference."""

    name: str
    mean_abs: float
    k3: float
    source: str


NOISE = {
    "float32": Noise("float32", 1e-3, 1e-5, "tiny models on SGLang's CPU backend differ by 5e-7, GPU kernels with TF32 off by 1e-4"),
    "bfloat16": Noise("bfloat16, dense", 0.02, 2e-3, "mean |D| 0.010-0.011 for 4B-8B (miles, vime#64); NeMo-RL gates k3 at 2e-3"),
    "bfloat16-moe": Noise("bfloat16, mixture of experts", 0.03, 5e-3, "mean |D| 0.009-0.016 for 30B-A3B (miles, prime-rl, SkyRL)"),
    "float8": Noise("float8 weights in the engine", 0.06, 0.02, "k3 0.0014-0.005 (NeMo-RL documentation); gate 0.02"),
}  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Size and differences of a group of tokens."""

    key: int
    num_tokens: int
    mean_abs: float
    mean: float
    k3: float


@dataclass(frozen=True)
class Measurement:
    """All metrics of one comparison.

    `by` holds groups per column; in curves, the key of a `Group` is the first position of its bin.
    """

    num_tokens: int
    num_sequences: int
    excluded: Excluded
    metrics: dict[str, float]
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
    return Measurement(
        num_tokens=len(difference),
        num_sequences=len(sequence.count),
        excluded=table.excluded,
        metrics=metrics,
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


def ratio(difference: Floats) -> Floats:
    """rho = exp(D), [n]."""
    return np.exp(np.minimum(difference, LARGEST_EXPONENT))


def k3(difference: Floats) -> Floats:
    """exp(D) - 1 - D per token, never negative; expm1 keeps small values exact."""
    bounded = np.minimum(difference, LARGEST_EXPONENT)
    return np.expm1(bounded) - bounded


def effective_share(log_ratio: Floats) -> float:
    """Effective sample size per sample, (mean rho)^2 / mean rho^2, of log ratios [n]."""
    scaled = np.exp(log_ratio - log_ratio.max())
    return float(scaled.mean() ** 2 / np.mean(scaled**2))


def correlation(left: Floats, right: Floats) -> float:
    """Pearson's correlation; 0 if one side is constant."""
    left, right = left - left.mean(), right - right.mean()
    scale = np.sqrt((left @ left) * (right @ right))
    return float(left @ right / scale) if scale > 0 else 0.0


def worst_tokens(table: TokenTable, count: int = 10) -> Ints:
    """Return the rows of the table with the largest |D|, largest first; int64 [count]."""
    return np.argsort(-np.abs(table.difference), kind="stable")[:count]


def histogram(difference: Floats, num_bins: int = 41) -> tuple[tuple[float, int], ...]:
    """Count tokens in equal bins of D up to the 99th percentile of |D|; the outer bins are open.

    Returns:
        (left edge, number of tokens) of each bin.
    """
    reach = float(np.quantile(np.abs(difference), 0.99)) or 1.0
    edges = np.linspace(-reach, reach, num_bins + 1)
    counts, _ = np.histogram(np.clip(difference, -reach, reach), edges)
    return tuple((float(edge), int(count)) for edge, count in zip(edges[:-1], counts, strict=True))


def all_groups(table: TokenTable) -> dict[str, tuple[Group, ...]]:
    """Group by position, by every recorded column, and by the 50 most frequent token ids."""
    difference = table.difference
    decile = np.searchsorted(np.quantile(-table.trainer, np.arange(0.1, 1.0, 0.1)), -table.trainer)
    columns = {
        "position": bins(table.position),
        "response_position": bins(table.response_position),
        "turn_position": bins(table.turn_position),
        "turn": table.turn,
        "length": bins(table.length, 10),
        "surprisal_decile": decile.astype(np.int64),
        "version": table.version,
        "worker": table.worker,
        "cached": None if table.cached_tokens is None else (table.cached_tokens > 0).astype(np.int64),
    }
    groups = {name: group_by(keys, difference) for name, keys in columns.items() if keys is not None}
    by_id = group_by(table.token_id, difference)
    groups["token_id"] = tuple(sorted(by_id, key=lambda group: (-group.num_tokens, group.key))[:50])
    return groups


def group_by(keys: Ints, difference: Floats) -> tuple[Group, ...]:
    names, inverse = np.unique(keys, return_inverse=True)
    count = np.bincount(inverse)
    means = [
        np.bincount(inverse, weights=v) / count for v in (np.abs(difference), difference, k3(difference))
    ]
    return tuple(
        Group(int(key), int(num), float(size), float(mean), float(k3_mean))
        for key, num, size, mean, k3_mean in zip(names, count, *means, strict=True)
    )


def bins(values: Ints, num_bins: int = NUM_BINS) -> Ints:
    """Return the first value of each value's bin; bins have equal width, 1 while values are few."""
    width = max(1, -(-int(values.max() + 1) // num_bins))
    return values // width * width


def added_tokens(model: str) -> dict[int, bool]:
    """Map ids added to the tokenizer's base vocabulary to whether each is special.

    Empty if the model's folder holds no `tokenizer.json`.
    """
    file = Path(model) / "tokenizer.json"
    if not file.is_file():
        return {}
    entries = json.loads(file.read_text(encoding="utf-8"))["added_tokens"]
    return {entry["id"]: entry["special"] for entry in entries}
