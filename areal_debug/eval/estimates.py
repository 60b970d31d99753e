"""pass@k, means with intervals, and paired differences, from numbers per prompt.

Prompts are the independent observations; the samples of a prompt are not. So intervals resample
prompts, and two models are compared prompt by prompt: prompts that are hard for both cancel out,
which makes the interval of a difference narrower than those of the two means.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
CONFIDENCE = 0.95
RESAMPLES = 10_000
PER_BLOCK = 5_000_000  # numbers drawn at a time, which bounds memory
# Above so many different values a bootstrap is slow, and its interval is the normal one.
MOST_RESAMPLED = 2000
SEED = 0  # the same samples have the same interval


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its interval; the limits are None where nothing bounds it."""

    value: float
    low: float | None
    high: float | None


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k samples solves a prompt.

    1 - C(n - c, k) / C(n, k) for c of n solved: Chen et al. 2021, arXiv 2107.03374, equation 1.
    """
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def estimate_mean(values: Values, is_share: bool = False, weights: Values | None = None) -> Estimate:
    """Estimate the mean of one number per prompt, with a percentile bootstrap over prompts.

    Where all prompts have the same value a bootstrap has no width. If that is 0 or 1 of a share,
    the interval is Wilson's for as many successes or failures; else there is none. Above
    `MOST_RESAMPLED` different values it is the normal one.

    Args:
        values: [prompts]; at least one.
        is_share: values are estimates of a probability.
        weights: [prompts] of each value, such as its tokens, not all 0; by default 1.
    """
    mean = float(np.average(values, weights=weights))
    if np.ptp(values) > 0:
        distinct, counts = np.unique(values, return_counts=True)
        if len(distinct) > MOST_RESAMPLED:
            return Estimate(mean, *normal(values, np.ones_like(values) if weights is None else weights))
        if weights is None or not np.ptp(weights):
            means = resampled_means(distinct, counts)
        else:
            means = resampled_ratios(values, weights)
        low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        return Estimate(mean, float(low), float(high))
    if is_share and mean in (0.0, 1.0):
        return Estimate(mean, *wilson(mean, len(values)))
    return Estimate(mean, None, None)


def resampled_means(distinct: Values, counts: NDArray[np.int64]) -> Values:
    """Return the means of `RESAMPLES` samples of the prompts with replacement.

    Only how often each distinct value is drawn matters, and of 8 samples there are 9 values.
    """
    random = np.random.default_rng(SEED)
    num = counts.sum()
    blocks = [
        random.multinomial(num, counts / num, size=size) @ distinct / num
        for size in block_sizes(len(distinct))
    ]
    return np.concatenate(blocks)


def block_sizes(num: int) -> list[int]:
    """Divide `RESAMPLES` draws of `num` numbers each into blocks; the draws stay the same."""
    size = min(RESAMPLES, max(1, PER_BLOCK // num))
    whole, rest = divmod(RESAMPLES, size)
    return [size] * whole + [rest] * bool(rest)


def resampled_ratios(values: Values, weights: Values) -> Values:
    """Return the weighted means of `RESAMPLES` samples of the prompts with replacement.

    The total of the weights is resampled with them: the loss per token of a set of texts.
    """
    random = np.random.default_rng(SEED)
    num, total = len(values), values * weights
    blocks = []
    for size in block_sizes(num):
        drawn = random.multinomial(num, np.full(num, 1 / num), size=size)  # [resamples, prompts]
        with np.errstate(invalid="ignore"):
            ratios = drawn @ total / (drawn @ weights)
        blocks.append(ratios[np.isfinite(ratios)])  # a sample may be of prompts with weight 0 alone
    return np.concatenate(blocks)


def normal(values: Values, weights: Values) -> tuple[float, float]:
    """Return the normal interval of a weighted mean of prompts, weights being drawn with them."""
    mean = float(np.average(values, weights=weights))
    each = weights * (values - mean) / weights.mean()
    half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * float(each.std()) / math.sqrt(len(values))
    return mean - half, mean + half


def wilson(share: float, num: int) -> tuple[float, float]:
    """Return Wilson's score interval of a share of `num` independent trials.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    centre = share + z * z / (2 * num)
    half = z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    scale = 1 + z * z / num
    return max((centre - half) / scale, 0.0), min((centre + half) / scale, 1.0)


def binomial(num: int, successes: int) -> float:
    """Return the chance of this many successes in `num` trials of chance one half."""
    ways = math.lgamma(num + 1) - math.lgamma(successes + 1) - math.lgamma(num - successes + 1)
    return math.exp(ways - num * math.log(2))


def chance_of_difference(differences: Values) -> float:
    """Return the two-sided p-value of a mean difference of 0, by flipping signs of prompts.

    If a prompt's two models are exchangeable, either sign of its difference is equally likely. Up
    to 2^12 sign patterns are all counted, more are drawn. Of differences of one size, as of one
    sample that is right or wrong, it is the exact test of McNemar 1947, a binomial tail.
    """
    changed = differences[differences != 0]
    if not len(changed):
        return 1.0
    if not np.ptp(np.abs(changed)):
        fewer = min(int((changed > 0).sum()), int((changed < 0).sum()))
        return min(1.0, 2 * math.fsum(binomial(len(changed), num) for num in range(fewer + 1)))
    observed = abs(changed.sum()) * (1 - 1e-12)  # rounding: a pattern equal to the observed one counts
    if len(changed) <= 12:
        patterns = (np.arange(2 ** len(changed))[:, None] >> np.arange(len(changed))) & 1
        return float((np.abs((2 * patterns - 1) @ changed) >= observed).mean())
    random = np.random.default_rng(SEED)
    reached = 0
    for size in block_sizes(len(changed)):
        signs = 2 * random.integers(0, 2, size=(size, len(changed))) - 1
        reached += int((np.abs(signs @ changed) >= observed).sum())
    return (reached + 1) / (RESAMPLES + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number, in their order.

    Of models that all equal the first one, the chance that any is called different stays at the
    level of a single test: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    ascending = sorted(range(len(p_values)), key=lambda i: p_values[i])
    for rank, place in enumerate(ascending):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted
