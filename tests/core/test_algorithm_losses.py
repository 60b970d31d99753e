"""Losses on packed tokens, explained variance and distillation: literal numbers and gradients.

Random data: `test_formulas.py`.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch

from areal_core.algorithm.losses import (
    distillation_loss,
    explained_variance,
    policy_loss,
    sapo_loss,
    sft_loss,
    value_loss,
)
from areal_core.algorithm.off_policy import (
    behaviour_weights,
    loglinear_proximal_logprobs,
    loglinear_share,
    second_moment_mask,
)
from tests.core.test_algorithm_rewards import ThreadRanks

ONE = torch.tensor([0, 4], dtype=torch.int32)  # one sequence of four tokens
TWO = torch.tensor([0, 2, 4], dtype=torch.int32)  # two of two


def log(*ratios: float) -> torch.Tensor:
    return torch.tensor(ratios).log()


def test_clip_limits_only_the_side_that_would_gain():
    # A = 1: ratio 1.5 gains at most 1.2, ratio 0.5 is unchanged; A = -1: 1.5 is unchanged, 0.5
    # becomes 0.8.
    loss, stats = policy_loss(
        log(1.5, 0.5, 1.5, 0.5),
        torch.zeros(4),
        torch.tensor([1.0, 1.0, -1.0, -1.0]),
        torch.ones(4),
        ONE,
        eps_clip=0.2,
    )
    torch.testing.assert_close(stats["loss"], torch.tensor([-1.2, -0.5, 1.5, 0.8]))
    torch.testing.assert_close(loss.sum(), torch.tensor(0.6))
    assert stats["clip_mask"].tolist() == [True, False, False, True]
    torch.testing.assert_close(stats["importance_weight"], torch.tensor([1.5, 0.5, 1.5, 0.5]))


def test_at_the_start_the_gradient_is_that_of_plain_policy_gradient():
    old, advantages = log(0.3, 0.2, 0.9, 0.4), torch.tensor([1.0, -2.0, 0.5, 3.0])
    for level in ("token", "sequence"):
        logprobs = old.clone().requires_grad_()
        loss, _ = policy_loss(logprobs, old, advantages, torch.tensor([1, 1, 1, 0]), TWO, level=level)
        loss.sum().backward()
        expected = [-1.0, 2.0, -0.5, 0.0] if level == "token" else [0.5, 0.5, -0.5, 0.0]
        torch.testing.assert_close(logprobs.grad, torch.tensor(expected))


def test_masked_tokens_touch_neither_loss_nor_gradient():
    logprobs = torch.tensor([-1.0, 300.0, float("inf"), -2.0], requires_grad=True)
    loss, _ = policy_loss(
        logprobs, torch.tensor([-1.0, -300.0, 0.0, -2.0]), torch.ones(4), torch.tensor([1, 0, 0, 1]), ONE
    )
    loss.sum().backward()
    assert loss.tolist() == [-1.0, 0.0, 0.0, -1.0]
    assert logprobs.grad.tolist() == [-1.0, 0.0, 0.0, -1.0]


def test_empty_mask_still_has_a_backward():
    logprobs = torch.zeros(4, requires_grad=True)
    for loss in (
        policy_loss(logprobs, torch.zeros(4), torch.ones(4), torch.zeros(4), ONE)[0],
        policy_loss(logprobs, torch.zeros(4), torch.ones(4), torch.zeros(4), ONE, level="sequence")[0],
        sft_loss(logprobs, torch.zeros(4), torch.tensor([0, 4]))[0],
        sapo_loss(logprobs, torch.zeros(4), torch.ones(4), torch.zeros(4))[0],
        value_loss(logprobs, torch.zeros(4), torch.ones(4), torch.zeros(4))[0],
    ):
        logprobs.grad = None
        loss.sum().backward()
        assert loss.sum().item() == 0.0
        assert logprobs.grad.tolist() == [0.0] * 4


def test_non_finite_logprobs_count_as_equal_policies():
    behaviour = torch.tensor([float("nan"), -float("inf"), 0.0, 0.0])
    kept, weights, _ = behaviour_weights(torch.zeros(4), behaviour, torch.ones(4), ONE, upper=5.0)
    assert kept.tolist() == [True] * 4
    assert weights.tolist() == [1.0] * 4


def test_value_loss_takes_the_worse_of_clipped_and_not():
    # V 3 from 0, clipped to 0.5, return 1: 0.5 * 4 = 2 against 0.5 * 0.25; V 3, return 4: 0.5
    # against 0.5 * 12.25.
    loss, stats = value_loss(
        torch.tensor([3.0, 3.0, 9.0]),
        torch.zeros(3),
        torch.tensor([1.0, 4.0, 0.0]),
        torch.tensor([1, 1, 0]),
        eps_clip=0.5,
    )
    assert stats["loss"].tolist() == [2.0, 6.125, 0.0]
    assert loss.item() == 8.125
    assert stats["clip_mask"].tolist() == [False, True, False]


def test_m2po_equals_numpy_for_any_distribution_of_tokens_over_ranks():
    random = np.random.default_rng(5)
    prox, behaviour = random.normal(-1, 0.4, (2, 100)).astype(np.float32)
    mask = random.random(100) < 0.7
    squares = np.where(mask, (prox - behaviour) ** 2, np.inf).astype(np.float64)
    for threshold in (0.001, 0.05, 0.2, 9.0):
        order = np.argsort(squares)[: mask.sum()]
        means = np.cumsum(squares[order]) / np.arange(1, mask.sum() + 1)
        expected = np.zeros(100, dtype=bool)
        expected[order[: max(1, (means < threshold).sum())]] = True
        arguments = [torch.from_numpy(array) for array in (prox, behaviour, mask)]
        assert second_moment_mask(*arguments, threshold).tolist() == expected.tolist()
        halves = [[tensor[part] for tensor in arguments] for part in (slice(0, 37), slice(37, None))]
        masks = ThreadRanks(2).run(partial(second_moment_mask, threshold=threshold), halves)
        assert torch.cat(masks).tolist() == expected.tolist()


def test_loglinear_proximal_interpolates_by_staleness():
    # Current version 5, proximal 4: sampled at 3 -> half way, at 1 -> 3/4, at 4 -> behaviour,
    # prompt -> behaviour.
    got = loglinear_share(torch.tensor([3, 1, 4, -1]), 5)
    torch.testing.assert_close(got, torch.tensor([0.5, 0.75, 0.0, 0.0]))
    torch.testing.assert_close(loglinear_share(torch.tensor([5, 6, 0]), 5), torch.tensor([0.0, 0.0, 0.8]))
    between = loglinear_proximal_logprobs(torch.full((4,), -2.0), torch.full((4,), -1.0), got)
    torch.testing.assert_close(between, torch.tensor([-1.5, -1.75, -1.0, -1.0]))


ONES = torch.ones(4)


def test_explained_variance_equals_numpy_over_ranks_and_of_equal_returns_is_nan():
    a_third = torch.full((4,), 1 / 3)
    assert math.isnan(explained_variance(torch.tensor([1.0, 2.0, 3.0, 4.0]), a_third, ONES))
    assert math.isnan(explained_variance(a_third, a_third, torch.zeros(4)))
    random = np.random.default_rng(3)
    values, returns = random.normal(5, 2, (2, 6, 11)).astype(np.float32)
    mask = random.random((6, 11)) < 0.6
    target, error = returns[mask].astype(float), (returns - values)[mask].astype(float)
    expected = 1 - error.var() / target.var()
    tensors = [torch.from_numpy(array) for array in (values, returns, mask)]
    assert explained_variance(*tensors) == pytest.approx(expected, rel=1e-6)
    sums: list[torch.Tensor] = []
    explained_variance(*(tensor[4:] for tensor in tensors), lambda own: sums.append(own) or own)
    assert explained_variance(
        *(tensor[:4] for tensor in tensors), lambda own: own + sums[0]
    ) == pytest.approx(expected, rel=1e-6)


def test_the_mean_of_distillation_and_its_gradient_are_those_of_the_reverse_kl():
    """Sum over a vocabulary, each token weighted by its probability under the behaviour policy."""
    random = torch.Generator().manual_seed(5)
    logits, teacher_logits, old_logits = torch.randn(3, 7, generator=random, dtype=torch.float64)
    logits.requires_grad_()
    teacher, behaviour = teacher_logits.log_softmax(0), old_logits.log_softmax(0)

    logprobs = logits.log_softmax(0)
    kl = (logprobs.exp() * (logprobs - teacher)).sum()
    [expected] = torch.autograd.grad(kl, logits)

    def of_token(token: int) -> torch.Tensor:
        one = slice(token, token + 1)
        loss, _ = distillation_loss(logits.log_softmax(0)[one], teacher[one], behaviour[one], ONES[:1])
        return behaviour[token].exp() * loss.sum()

    mean = sum(of_token(token) for token in range(7))
    [gradient] = torch.autograd.grad(mean, logits)
    torch.testing.assert_close(mean, kl)
    torch.testing.assert_close(gradient, expected)
