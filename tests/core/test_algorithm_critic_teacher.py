"""Explained variance and distillation from a teacher, against literal numbers, numpy and the KL."""

import math

import numpy as np
import pytest
import torch

from areal_core.algorithm.losses import distillation_loss, explained_variance

ONES = torch.ones(4)


def test_explained_variance_of_equal_returns_is_nan():
    a_third = torch.full((4,), 1 / 3)
    assert math.isnan(explained_variance(torch.tensor([1.0, 2.0, 3.0, 4.0]), a_third, ONES))
    assert math.isnan(explained_variance(a_third, a_third, torch.zeros(4)))


def test_explained_variance_equals_numpy_over_ranks():
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
