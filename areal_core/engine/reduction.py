"""How FSDP2 sums gradients over ranks: by the library's reduce-scatter, or in the order of ranks.

In rank order every rank gets the parts that it owns from all others (an all-to-all, the same bytes
as a reduce-scatter) and adds them one after the other. The bits depend neither on the library's
algorithm nor on the topology, and fewer processes can repeat them (`virtual_ranks.py`). It needs
memory for what is received, which is as large as what is sent: a layer's gradients.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

# torch renamed it in 2.14
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class GradientReduction:
    """The reduce-scatter of an FSDP module.

    Attributes:
        fixed_order: sum in rank order.
        carries: the sum continues that of the call before, and is not divided (`RankOrderSum`).
        note: if set, called after each one with what this rank sent, [elements of all ranks], and
            the number of ranks.
    """

    def __init__(self, fixed_order: bool = False) -> None:
        self.fixed_order, self.carries = fixed_order, False
        self.carried: Tensor | None = None
        self.note: Callable[[Tensor, int], None] | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is sent or received, for FSDP."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Sum over the ranks of `group`, each of which gets its part; a collective."""
        work = None
        if self.fixed_order or self.carries:
            self._sum_in_order(output_tensor, input_tensor, group, is_average=op == dist.ReduceOp.AVG)
        else:
            work = reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        if self.note is not None:
            self.note(input_tensor, group.size())
        return work

    def _sum_in_order(
        self, output: Tensor, sent: Tensor, group: dist.ProcessGroup, *, is_average: bool
    ) -> None:
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        first, *others = received.view(group.size(), -1).unbind()
        if self.carried is None:
            output.copy_(first)
        else:
            torch.add(self.carried, first, out=output)
        for part in others:
            output += part
        if self.carries:
            self.carried = output.clone()
        elif is_average:
            output /= group.size()


class RankOrderSum:
    """The sum of the gradients of ranks that take turns in a process, in the order of the ranks."""

    def __init__(self) -> None:
        self.so_far: list[Tensor | None] = []

    def begin(self, model: nn.Module) -> None:
        """Set aside the gradients of the micro-batches before."""
        parameters = list(model.parameters())
        self.so_far = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        set_carrying(model, True)

    def next(self, model: nn.Module, num_processes: int) -> None:
        """Prepare for the next rank: with several processes, `GradientReduction` has the sum."""
        if num_processes > 1:
            for parameter in model.parameters():
                parameter.grad = None

    def end(self, model: nn.Module, num_ranks: int) -> None:
        """Average the sum over ranks, and add it to what was set aside, as FSDP does."""
        set_carrying(model, False)
        for parameter, before in zip(model.parameters(), self.so_far, strict=True):
            if parameter.grad is None:
                parameter.grad = before
                continue
            local_of(parameter.grad).div_(num_ranks)
            if before is not None:
                local_of(before).add_(local_of(parameter.grad))
                parameter.grad = before
        self.so_far = []


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def set_carrying(model: nn.Module, carries: bool) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            reduction = reduction_of(module)
            reduction.carries, reduction.carried = carries, None


def set_reduction(module: nn.Module, fixed_order: bool) -> None:
    """Let an FSDP module sum its gradients by a reduction of ours."""
    assert isinstance(module, FSDPModule)
    reduction = GradientReduction(fixed_order)
    vars(module)["gradient_reduction"] = reduction
    module.set_custom_reduce_scatter(cast(Any, reduction))


def reduction_of(module: nn.Module) -> GradientReduction:
    """Return the reduction that `set_reduction` made."""
    return cast(GradientReduction, vars(module)["gradient_reduction"])
