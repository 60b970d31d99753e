"""How FSDP2 sums gradients over ranks: by the library's reduce-scatter, or in the order of ranks.

In rank order every rank gets the parts that it owns from all others (an all-to-all, the same bytes
as a reduce-scatter) and adds them one after the other. The bits depend neither on the library's
algorithm nor on the topology, and fewer processes can repeat them (`virtual_ranks.py`). It needs
memory for what is received, which is as large as what is sent: a layer's gradients.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from areal_core.engine.gloo_order import Piece, padded_size, pieces_of_shards, sum_as_gloo

Weights = list[tuple[str, nn.Module, str]]  # name, module and attribute of each
# torch renamed it in 2.14
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class OrderedSum:
    """The sum of a tensor over ranks, each of which adds its own: in rank order, or that of gloo.

    Args:
        pieces: of the tensor, for gloo's order, which needs the tensors of all ranks at once.
    """

    def __init__(self, num_ranks: int, pieces: Sequence[Piece] | None = None) -> None:
        self.num_ranks, self.pieces = num_ranks, pieces
        self.num_added, self.parts = 0, list[Tensor]()

    def add(self, part: Tensor) -> None:
        """Add the tensor of the next rank; in gloo's order it is kept."""
        self.num_added += 1
        if self.pieces is not None:
            self.parts.append(part)
        elif not self.parts:
            self.parts.append(part.clone())
        else:
            self.parts[0] += part

    @property
    def is_complete(self) -> bool:
        """Whether every rank has added its tensor."""
        return self.num_added == self.num_ranks

    def value(self) -> Tensor:
        """Return the sum over all ranks."""
        return self.parts[0] if self.pieces is None else sum_as_gloo(self.parts, self.pieces)


class GradientReduction:
    """The reduce-scatter of an FSDP module.

    Attributes:
        fixed_order: sum in rank order.
        carried: the sum over virtual ranks that this call continues, not divided (`GradientSum`).
        note: if set, called after each one with what this rank sent, [elements of all ranks], and
            the number of ranks.
    """

    def __init__(self, fixed_order: bool = False) -> None:
        self.fixed_order = fixed_order
        self.carried: OrderedSum | None = None
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
        if self.carried is not None or self.fixed_order:
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
        total = self.carried or OrderedSum(group.size())
        for part in received.view(group.size(), -1):
            total.add(part)
        if total.is_complete:
            output.copy_(total.value())
        if self.carried is None and is_average:
            output /= group.size()


class GradientSum:
    """The sum of the gradients of ranks that take turns in a process.

    Args:
        as_gloo: in gloo's order, which needs the memory of as many gradients as there are ranks;
            else in the order of the ranks. For two ranks they are the same.
    """

    def __init__(self, num_ranks: int, as_gloo: bool) -> None:
        self.num_ranks, self.as_gloo = num_ranks, as_gloo and num_ranks > 2
        self.so_far: list[Tensor | None] = []
        self.of_weights: dict[str, OrderedSum] = {}  # in gloo's order, with one process

    def begin(self, model: nn.Module, process: int, num_processes: int) -> None:
        """Set aside the gradients of the micro-batches before."""
        parameters = list(model.parameters())
        self.so_far = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        for name, module in model.named_modules():
            if is_sharded(module):
                weights = [(path, getattr(owner, a)) for path, owner, a in own_weights(name, module)]
                shapes = {path: weight.shape for path, weight in weights if weight.requires_grad}
                pieces = pieces_of_shards(list(shapes.values()), self.num_ranks, process, num_processes)
                if num_processes > 1:
                    sizes = [padded_size(shape, num_processes) for shape in shapes.values()]
                    whole = joined(pieces, sizes) if self.as_gloo else None
                    reduction_of(module).carried = OrderedSum(self.num_ranks, whole)
                elif self.as_gloo:
                    sums = (OrderedSum(self.num_ranks, of_weight) for of_weight in pieces)
                    self.of_weights |= zip(shapes, sums, strict=True)

    def next(self, model: nn.Module, num_processes: int) -> None:
        """Prepare for the next rank: the gradients so far are in a sum, or rank 0 adds to them."""
        if num_processes > 1 or self.of_weights:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None and name in self.of_weights:
                    self.of_weights[name].add(local_of(parameter.grad))
                parameter.grad = None

    def end(self, model: nn.Module) -> None:
        """Average the sum over ranks, and add it to what was set aside, as FSDP does."""
        for module in model.modules():
            if is_sharded(module):
                reduction_of(module).carried = None
        for (name, parameter), before in zip(model.named_parameters(), self.so_far, strict=True):
            if parameter.grad is None:
                parameter.grad = before
                continue
            local = local_of(parameter.grad)
            if name in self.of_weights:
                self.of_weights[name].add(local.clone())
                local.copy_(self.of_weights[name].value())
            local.div_(self.num_ranks)
            if before is not None:
                local_of(before).add_(local)
                parameter.grad = before
        self.so_far, self.of_weights = [], {}


def joined(pieces: Sequence[Sequence[Piece]], sizes: Sequence[int]) -> list[Piece]:
    """Return the pieces of tensors that lie one after the other, each padded to a size."""
    starts = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
    return [
        (n, at + first, at + end)
        for of_one, at in zip(pieces, starts, strict=True)
        for n, first, end in of_one
    ]


def own_weights(name: str, module: nn.Module) -> Weights:
    """Return the weights that FSDP gathers with this module, in its order."""
    inner = {part for m in module.modules() if m is not module and is_sharded(m) for part in m.modules()}
    found, seen = [], set()
    for path, part in module.named_modules(prefix=name):
        if part in inner:
            continue
        for attribute, weight in part.named_parameters(recurse=False):
            if weight not in seen:  # tied weights are one
                seen.add(weight)
                found.append((f"{path}.{attribute}".lstrip("."), part, attribute))
    return found


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def set_reduction(module: nn.Module, fixed_order: bool) -> None:
    """Let an FSDP module sum its gradients by a reduction of ours."""
    assert isinstance(module, FSDPModule)
    reduction = GradientReduction(fixed_order)
    vars(module)["gradient_reduction"] = reduction
    module.set_custom_reduce_scatter(cast(Any, reduction))


def reduction_of(module: nn.Module) -> GradientReduction:
    """Return the reduction that `set_reduction` made."""
    return cast(GradientReduction, vars(module)["gradient_reduction"])
