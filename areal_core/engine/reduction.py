"""How FSDP2 sums gradients over ranks, and where what a rank sends can be observed."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

# torch renamed it in 2.14
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class GradientReduction:
    """The reduce-scatter of an FSDP module.

    `note`, if set, is called after each one with what this rank sent, [elements of all ranks], and
    the number of ranks.
    """

    def __init__(self) -> None:
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
        work = reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        if self.note is not None:
            self.note(input_tensor, group.size())
        return work


def set_reduction(module: nn.Module) -> None:
    """Let an FSDP module sum its gradients by a reduction of ours."""
    assert isinstance(module, FSDPModule)
    reduction = GradientReduction()
    vars(module)["gradient_reduction"] = reduction
    module.set_custom_reduce_scatter(cast(Any, reduction))


def reduction_of(module: nn.Module) -> GradientReduction:
    """Return the reduction that `set_reduction` made."""
    return cast(GradientReduction, vars(module)["gradient_reduction"])
