"""pass@k, intervals and p-values: literal numbers, and other packages' implementations."""

import itertools

import numpy as np
import pytest

from areal_debug.eval import estimates
from areal_debug.eval.estimates import Estimate, chance_of_difference, estimate_mean, holm, pass_at_k


def test_pass_at_k_is_the_share_of_subsets_that_have_a_solved_sample():
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    assert pass_at_k(8, 0, 8) == 0.0
    assert pass_at_k(8, 1, 8) == 1.0
    solved = [1, 0, 0, 1, 0, 0, 0]
    for k in range(1, 8):
        subsets = list(itertools.combinations(solved, k))
        assert pass_at_k(7, 2, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_an_interval_is_the_percentile_bootstrap_over_prompts():
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(3).choice([0.0, 0.25, 0.5, 1.0], size=40)
    found = estimate_mean(values)
    other = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=50_000, rng=1)
    assert found.value == values.mean()
    assert found.low == pytest.approx(other.confidence_interval.low, abs=0.006)
    assert found.high == pytest.approx(other.confidence_interval.high, abs=0.006)
    assert estimate_mean(values) == found  # the same samples, the same interval


def test_where_all_prompts_are_equal_a_share_has_wilsons_interval_and_a_mean_has_none():
    found = estimate_mean(np.zeros(24), is_share=True)
    assert (found.value, found.low) == (0.0, 0.0)
    assert found.high == pytest.approx(0.13797, abs=1e-4)
    assert estimate_mean(np.ones(24), is_share=True).low == pytest.approx(1 - 0.13797, abs=1e-4)
    assert estimate_mean(np.zeros(24)) == Estimate(0.0, None, None)
    assert estimate_mean(np.full(3, 0.5), is_share=True) == Estimate(0.5, None, None)


def test_signs_are_flipped_exactly_for_few_prompts_and_at_random_for_many():
    assert chance_of_difference(np.zeros(9)) == 1.0
    assert chance_of_difference(np.array([1.0, -1.0])) == 1.0
    assert chance_of_difference(np.array([0.5] * 5 + [0.0] * 7)) == 2 / 32
    assert chance_of_difference(np.array([0.1, 0.2, -0.3])) == 1.0  # their sum is 0, but for rounding
    assert chance_of_difference(np.linspace(0.1, 1, 40)) == 1 / 10_001
    stats = pytest.importorskip("scipy.stats")
    differences = np.random.default_rng(0).normal(0.35, 1.0, size=30)
    other = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=20_000, rng=0
    )
    assert chance_of_difference(differences) == pytest.approx(other.pvalue, abs=0.01)


@pytest.mark.parametrize(("gained", "lost"), [(40, 0), (30, 20), (7, 7), (3, 12), (600, 500)])
def test_of_one_sample_each_the_test_is_mcnemars_exact_one(gained, lost):
    binomtest = pytest.importorskip("scipy.stats").binomtest
    differences = np.array([1.0] * gained + [-1.0] * lost + [0.0] * 5)
    assert chance_of_difference(differences) == pytest.approx(binomtest(gained, gained + lost).pvalue)


def test_a_weighted_mean_is_resampled_with_its_weights():
    values, weights = np.array([4.0, 2.0, 1.0]), np.array([1.0, 3.0, 0.0])
    estimate = estimate_mean(values, weights=weights)
    assert estimate.value == pytest.approx(2.5)
    assert (estimate.low, estimate.high) == (2.0, 4.0)  # the row without weight never counts
    even = estimate_mean(values, weights=np.full(3, 7.0))
    assert even == estimate_mean(values)


def test_p_values_of_several_models_are_adjusted_as_holm_does():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.long
@pytest.mark.parametrize(("rate", "least"), [(0.5, 0.90), (0.1, 0.88)])
def test_about_95_of_100_intervals_have_the_true_value(rate, least):
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        chances = random.beta(rate, 1 - rate, size=40)  # of each prompt to be solved
        found = estimate_mean(random.binomial(8, chances) / 8, is_share=True)
        covered += found.low <= rate <= found.high
    assert least < covered / 400 < 0.98


@pytest.mark.long
def test_of_many_prompts_the_interval_is_the_normal_one_and_the_p_value_has_no_large_numbers(monkeypatch):
    values = np.random.default_rng(1).normal(1.0, 2.0, size=800)
    weights = np.random.default_rng(2).integers(1, 9, size=800).astype(float)
    resampled = [estimate_mean(values), estimate_mean(values, weights=weights)]
    monkeypatch.setattr(estimates, "MOST_RESAMPLED", 500)
    normal = [estimate_mean(values), estimate_mean(values, weights=weights)]
    for one, other in zip(normal, resampled, strict=True):
        assert one.value == other.value
        assert (one.low, one.high) != (other.low, other.high)
        assert (one.low, one.high) == pytest.approx((other.low, other.high), abs=0.008)
    signs = np.repeat([1.0, -1.0], [50_500, 49_500])
    assert chance_of_difference(signs) == pytest.approx(0.00158, rel=0.02)  # z = (1000 - 1) / sqrt(100,000)
