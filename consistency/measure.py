"""Metrics of the mismatch of trainer and engine: float64, over compared tokens only, no padding.

The sign is always D = trainer - engine, rho = exp(D). The metrics are those of the field (k1, k2,
k3: J. Schulman, "Approximating KL divergence", 2020; effective sample size: Kong, 1992); `ALIASES`
maps them to the names under which training frameworks log them.

Groups locate a mismatch: by position, turn, surprisal, version and engine.
"""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from consistency.tokens import Excluded, Floats, Ints, TokenTable

LARGEST_EXPONENT = 700.0  # exp() overflows at 709.8

NUM_BINS = 40

# A sequence's ratio is bounded as in verl's rollout correction, so that both chi2 are comparable.
SEQUENCE_BOUND = 20.0
# Below this mean |D| there is nothing to explain: float32 kernels differ by less.
NEGLIGIBLE = 1e-4
# Below the float32 resolution of a logprob, a median counts as 0 in ratios.
SMALLEST_SIZE = 1e-12

TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ALIASES: dict[str, list[str]] = TABLES["aliases"]


@dataclass(frozen=True)
class Noise:
    """Noise floor of a precision: the largest published healthy difference.

    `own` is the largest mean |D| that this model's rounding explains, infinity if not measured.
    """

    name: str
    mean_abs: float
    k3: float
    source: str
    own: float = float("inf")


NOISE = {key: Noise(**row) for key, row in TABLES["noise"].items()}


@dataclass(frozen=True)
class Group:
    """Size and differences of a group of tokens."""

    key: int
    num_tokens: int
    mean_abs: float
    mean: float


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
    _, inverse = np.unique(table.sequence, return_inverse=True)
    count = np.bincount(inverse)  # of each sequence
    total = np.bincount(inverse, weights=difference).astype(np.float64)
    metrics = {
        **sizes(difference),
        **bias(difference, count, total),
        **divergences(table),
        **ratios(difference),
        **probabilities(table),
        **sequence_ratios(count, total),
        **tail(difference),
        "surprisal_correlation": correlation(difference, -table.trainer),
    }
    return Measurement(
        num_tokens=len(difference),
        num_sequences=len(count),
        excluded=table.excluded,
        metrics=metrics,
        by=all_groups(table),
        histogram=histogram(difference),
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


def bias(difference: Floats, count: Ints, total: Floats) -> dict[str, float]:
    """Mean of D and its t-statistic, clustered by sequence (its tokens are not independent)."""
    mean = float(difference.mean())
    residual = total - mean * count
    clusters = len(residual)
    error = np.sqrt((residual**2).sum() * clusters / max(clusters - 1, 1)) / count.sum()
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
    return {
        "chi2_token": float(np.mean(rho**2) - 1),
        "ess_token": effective_share(np.minimum(difference, LARGEST_EXPONENT)),
        "ratio_mean": float(rho.mean()),
        "ratio_max": float(rho.max()),
        "share_outside_eps_0.2": float(np.mean((rho < 0.8) | (rho > 1.2))),
        "share_above_ln2": float(np.mean(size > np.log(2))),
        "mult_prob_error_mean": float(multiple.mean()),
    }


def probabilities(table: TokenTable) -> dict[str, float]:
    """Differences of probabilities (insensitive to unlikely tokens), correlations, perplexities."""
    trainer, engine = np.exp(table.trainer), np.exp(table.engine)
    size = np.abs(trainer - engine)
    return {
        "prob_diff_mean": float(size.mean()),
        "prob_pearson": correlation(trainer, engine),
        "logprob_pearson": correlation(table.trainer, table.engine),
        "ppl_trainer": float(np.exp(-table.trainer.mean())),
    }


def sequence_ratios(count: Ints, total: Floats) -> dict[str, float]:
    mean = total / count
    bounded = np.clip(total, -SEQUENCE_BOUND, SEQUENCE_BOUND)
    return {
        "chi2_sequence": float(np.exp(2 * bounded).mean() - 1),
        "ess_sequence": effective_share(total),
        "geometric_ratio_mean": float(ratio(mean).mean()),
        "log_ppl_diff": float(-mean.mean()),
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
    """Group by position, length, surprisal and recorded columns."""
    difference = table.difference
    decile = np.searchsorted(np.quantile(-table.trainer, np.arange(0.1, 1.0, 0.1)), -table.trainer)
    columns = {
        "response_position": bins(table.response_position),
        "turn": table.turn,
        "surprisal_decile": decile.astype(np.int64),
        "version": table.version,
        "worker": table.worker,
    }
    return {name: group_by(keys, difference) for name, keys in columns.items() if keys is not None}


def group_by(keys: Ints, difference: Floats) -> tuple[Group, ...]:
    names, sizes, count = means_by(keys, np.abs(difference))
    means = means_by(keys, difference)[1]
    columns = (column.tolist() for column in (names, count, sizes, means))
    return tuple(Group(*row) for row in zip(*columns, strict=True))


def means_by(keys: Ints, values: Floats) -> tuple[Ints, Floats, Ints]:
    """Return each key, the mean of its values, and their number."""
    names, inverse = np.unique(keys, return_inverse=True)
    count = np.bincount(inverse)
    return names, np.bincount(inverse, weights=values) / count, count


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
