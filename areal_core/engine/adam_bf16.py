"""AdamW with its first moment in bfloat16: 10 bytes per parameter, master weight included, not 12.

The second moment stays in float32. At beta2 = 0.999 it decreases by at most 0.1 % per step, which
is less than half the distance between two bfloat16 numbers (0.2 to 0.4 %): rounded at each step it
could grow but never decrease. Master weights are float32 and need no compensated (Kahan) sum.
"""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer


class AdamWBf16(Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2) with `exp_avg` in bfloat16.

    `exp_avg` is rounded after the step has used it in float32.
    """

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
        """Load the result of `state_dict`."""
        super().load_state_dict(state_dict)  # casts states to the parameter's dtype
        for state in self.state.values():
            state["exp_avg"] = state["exp_avg"].bfloat16()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Raises:
            ValueError: `closure` was given; the gradients must exist already.
        """
        if closure is not None:
            raise ValueError("AdamWBf16.step takes no closure: compute the gradients before the step")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, parameter.grad, self.state[parameter], **group)
        return None


def _update(
    parameter: Tensor,
    gradient: Tensor,
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
    state["step"] += 1
    step = float(state["step"])
    mean = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
    state["exp_avg"].copy_(mean)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (square / (1 - beta2**step)).sqrt_().add_(eps)
    parameter.mul_(1 - lr * weight_decay).addcdiv_(mean, root, value=-lr / (1 - beta1**step))
