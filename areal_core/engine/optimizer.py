"""AdamW or SGD over float32 master weights, learning-rate schedules, and gradient clipping."""

import math
from collections.abc import Callable, Iterable
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from areal_core.engine.gloo_order import sum_as_gloo
from areal_core.engine.ranks import Ranks
from areal_core.engine.reduction import local_of


def build_optimizer(
    parameters: Iterable[Tensor],
    *,
    kind: str,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> Optimizer:
    """Build an optimizer with states in float32, except for the first moment of "adam_bf16".

    Args:
        parameters: float32; the states have their dtype.

    Raises:
        ValueError: `kind` is not one of "adam", "adam_bf16", "sgd".
    """
    if kind == "adam":
        return torch.optim.AdamW(
            parameters, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, fused=True
        )
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=lr, weight_decay=weight_decay)
    if kind == "adam_bf16":
        return AdamWBf16(parameters, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
    raise ValueError(f"optimizer.type is {kind!r}: use 'adam' (AdamW), 'adam_bf16' or 'sgd'")


def schedule_factor(
    kind: str, total_steps: int, warmup_steps: int, min_lr_ratio: float
) -> Callable[[int], float]:
    """Return the learning rate's factor as a function of the step.

    It is a linear warm-up from 0, then constant or a linear or cosine decay to `min_lr_ratio` after
    `total_steps`.

    Raises:
        ValueError: `kind` is not one of "constant", "linear", "cosine".
    """
    decays: dict[str, Callable[[float], float]] = {
        "constant": lambda progress: 1.0,
        "linear": lambda progress: 1.0 - progress,
        "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    }
    if kind not in decays:
        raise ValueError(f"optimizer.lr_scheduler_type is {kind!r}: use one of {sorted(decays)}")

    def factor(step: int) -> float:
        if step < warmup_steps:
            return step / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        if kind == "constant":
            return 1.0
        return min_lr_ratio + (1.0 - min_lr_ratio) * decays[kind](progress)

    return factor


def build_schedule(
    optimizer: Optimizer, *, kind: str, total_steps: int, warmup_proportion: float, min_lr_ratio: float
) -> LambdaLR:
    warmup_steps = int(warmup_proportion * total_steps)
    return LambdaLR(optimizer, schedule_factor(kind, total_steps, warmup_steps, min_lr_ratio))


def set_base_lr(schedule: LambdaLR, lr: float) -> None:
    """Give a schedule another learning rate at its position."""
    schedule.base_lrs = [lr]
    schedule._last_lr = [lr * schedule.lr_lambdas[0](schedule.last_epoch)]
    schedule.optimizer.param_groups[0]["lr"] = schedule._last_lr[0]


def gradient_norm(parameters: Iterable[Tensor], ranks: Ranks | None = None) -> Tensor:
    """Return the L2 norm of all gradients, [] on their device; a collective.

    Parameters that are replicated over ranks, such as norms under tensor parallelism, count once.

    Args:
        ranks: if they sum in a fixed order, the norm is that of the norms of the shards of each
            rank, in rank order. Virtual ranks give the norm of those that they stand for.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if ranks is None or not (ranks.fixed_order or ranks.is_virtual):
        return _global_norm(gradients)
    of_ranks = list(zip(*(_shards(gradient, ranks) for gradient in gradients), strict=True))
    if ranks.sums_as_gloo:  # as DTensor does: of each gradient, the sum of the squares of ranks
        squares = [torch.stack(torch._foreach_norm(shards)) ** 2 for shards in of_ranks]
        return torch.linalg.vector_norm(sum_as_gloo(squares) ** 0.5)
    norms = [torch.nn.utils.get_total_norm([s for s in shards if s.numel()]) for shards in of_ranks]
    return torch.linalg.vector_norm(torch.stack(norms if ranks.is_virtual else ranks.gather_rows(norms[0])))


def _shards(gradient: Tensor, ranks: Ranks) -> list[Tensor]:
    """Return this rank's shard; of virtual ranks the shard of each."""
    if not ranks.is_virtual:
        return [local_of(gradient)]
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    chunks = list(whole.chunk(ranks.world_size))
    return chunks + [whole[:0]] * (ranks.world_size - len(chunks))


def _global_norm(gradients: list[Tensor]) -> Tensor:
    meshes = {gradient.device_mesh for gradient in gradients if isinstance(gradient, DTensor)}
    if all(mesh.ndim == 1 for mesh in meshes):
        norm = torch.nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    (mesh,) = meshes
    sharded = cast(list[DTensor], gradients)  # with tensor parallelism every parameter is a DTensor
    squares = []
    for placements in dict.fromkeys(gradient.placements for gradient in sharded):
        shards = [gradient.to_local() for gradient in sharded if gradient.placements == placements]
        square = torch.nn.utils.get_total_norm(shards) ** 2
        for dimension, placed in enumerate(placements):
            if not placed.is_replicate():
                dist.all_reduce(square, group=mesh.get_group(dimension))
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


class AdamWBf16(Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2) with `exp_avg` in bfloat16.

    It needs 10 bytes per parameter, master weight included, not 12. `exp_avg` is rounded after the
    step has used it in float32.

    The second moment stays in float32. At beta2 = 0.999 it decreases by at most 0.1 % per step,
    which is less than half the distance between two bfloat16 numbers (0.2 to 0.4 %): rounded at
    each step it could grow but never decrease. Master weights are float32 and need no compensated
    (Kahan) sum.
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
