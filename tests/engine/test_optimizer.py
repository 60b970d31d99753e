"""Schedule and gradient norm, and Adam with moments in bfloat16."""

import math

import pytest
import torch

from areal_core.engine.optimizer import AdamWBf16, gradient_norm, schedule_factor


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


SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def some_gradients(steps: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for _ in range(steps)]


def train(make, gradients: list[torch.Tensor], dtype: torch.dtype = torch.float32):
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, len(gradients[0]), dtype=dtype))
    optimizer = make([parameter], **SETTINGS)
    for gradient in gradients:
        parameter.grad = gradient.to(dtype)
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


def test_many_steps_stay_near_a_float64_twin_that_rounds_the_same_moment():
    gradients = some_gradients(200, 64)
    ours, state = train(AdamWBf16, gradients)
    beta1, beta2 = SETTINGS["betas"]
    weight = torch.linspace(-1, 1, 64, dtype=torch.float64)
    mean, square = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.float64)
    for step, gradient in enumerate(gradients, start=1):
        g = gradient.double()
        m = beta1 * mean.double() + (1 - beta1) * g
        mean = m.bfloat16()
        square = beta2 * square + (1 - beta2) * g**2
        weight *= 1 - SETTINGS["lr"] * SETTINGS["weight_decay"]
        root = (square / (1 - beta2**step)).sqrt() + SETTINGS["eps"]
        weight -= SETTINGS["lr"] / (1 - beta1**step) * m / root
    assert state["exp_avg"].dtype == torch.bfloat16
    assert state["exp_avg_sq"].dtype == torch.float32
    # A moment on the other side of a rounding boundary is off by 2**-8 of itself, a few times in
    # 200 steps.
    torch.testing.assert_close(ours.double(), weight, rtol=0, atol=1e-4)
    exact, _ = train(torch.optim.AdamW, gradients, torch.float64)
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=2e-3)


def test_training_continues_from_saved_states_to_the_same_bits():
    gradients = some_gradients(6, 8)
    ours, _ = train(AdamWBf16, gradients)
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 8))
    first, second = AdamWBf16([parameter], **SETTINGS), AdamWBf16([parameter], **SETTINGS)
    for number, gradient in enumerate(gradients):
        parameter.grad = gradient
        if number == 2:
            second.load_state_dict(first.state_dict())
        (first if number < 2 else second).step()
    assert torch.equal(parameter.detach(), ours)
    assert second.state[parameter]["exp_avg"].dtype == torch.bfloat16
