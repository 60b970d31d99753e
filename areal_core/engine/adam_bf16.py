"""AdamW whose first moment is stored in bfloat16: 10 bytes a parameter, with its float32 master weight, instead of 12.

The second moment stays in float32. At beta2 = 0.999 it moves by 0.1 % a step at most downwards, which is less than half the distance
between two numbers of bfloat16 (0.2 to 0.4 %): rounded at each step it could grow and never fall. Master weights are float32, so that
nothing has to be made up for there by a compensated (Kahan) sum.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class AdamWBf16(Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2) with `exp_avg` in bfloat16, rounded after each step's use of it."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave. Torch loads every state in its parameter's dtype."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["exp_avg"] = state["exp_avg"].bfloat16()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One step on every parameter that has a gradient; `closure` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, self.state[parameter], **group)


def _update(
    parameter: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    **_: object,
) -> None:
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    beta1, beta2 = betas
    gradient = parameter.grad
    state["step"] += 1
    step = float(state["step"])
    mean = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
    state["exp_avg"].copy_(mean)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (square / (1 - beta2**step)).sqrt_().add_(eps)
    parameter.mul_(1 - lr * weight_decay).addcdiv_(mean, root, value=-lr / (1 - beta1**step))
