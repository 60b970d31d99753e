import math

import pytest
import torch

from areal_core.engine.optimizer import gradient_norm, schedule_factor


def test_cosine_schedule_ends_at_the_floor():
    factor = schedule_factor("cosine", total_steps=8, warmup_steps=0, min_lr_ratio=0.1)
    assert factor(0) == 1.0
    assert factor(4) == pytest.approx(0.55)
    assert factor(8) == pytest.approx(0.1)


@pytest.mark.parametrize(("gradient", "norm"), [([3.0, 4.0], 5.0), ([math.inf, 1.0], math.inf)])
def test_gradient_norm_is_that_of_all_gradients(gradient, norm):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    for parameter, value in zip(parameters, gradient, strict=False):  # the last one has no gradient
        parameter.grad = torch.tensor([value])
    assert float(gradient_norm(parameters)) == norm
