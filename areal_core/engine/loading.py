"""Weights that rank 0 reads and broadcasts: the other ranks build the model on "meta".

```
rank 0      reads the model       -- broadcast of a layer --> FSDP keeps this rank's shard -- the next layer -->
the others  build it on "meta"    <- receive the full layer   FSDP keeps this rank's shard    free the rest
```

So no other rank ever has more than its shards and one layer in memory. The shards are the same as
if each rank had read the model.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from areal_core.engine.ranks import Ranks


def broadcast_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Copy the buffers of rank 0 to every rank's device; a collective."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = _broadcast(buffer, ranks)


def broadcast_parameters(module: nn.Module, ranks: Ranks) -> None:
    """Copy rank 0's parameters that are not sharded yet to every rank's device; a collective."""
    received: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                continue
            if parameter not in received:
                full = _broadcast(parameter.detach(), ranks)
                received[parameter] = nn.Parameter(full, requires_grad=parameter.requires_grad)
            part.register_parameter(name, received[parameter])


def _broadcast(tensor: Tensor, ranks: Ranks) -> Tensor:
    is_here = ranks.rank == 0
    shape, dtype = tensor.shape, tensor.dtype
    full = tensor.to(ranks.device) if is_here else torch.empty(shape, dtype=dtype, device=ranks.device)
    dist.broadcast(full.contiguous(), src=0)
    return full
