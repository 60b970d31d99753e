"""A checkpoint that one rank reads: the others build the model without memory, and are given one part after the other.

```
rank 0      reads the whole model -- broadcast of a layer --> FSDP keeps this rank's shard -- the next layer -->
the others  build it on "meta"    <- takes the layer, whole    FSDP keeps this rank's shard    lets go of the rest
```

So no other rank ever holds more than its shards and one layer. What is sharded is the same as if each had read it.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from areal_core.engine.ranks import Ranks


def take_buffers_from_rank_0(model: nn.Module, ranks: Ranks) -> None:
    """Give every rank the buffers of rank 0, on its device; a collective."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = _from_rank_0(buffer, ranks)


def take_parameters_from_rank_0(module: nn.Module, ranks: Ranks) -> None:
    """Give every rank the parameters of rank 0 that are not sharded yet, whole, on its device; a collective."""
    taken: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                continue
            if parameter not in taken:
                whole = _from_rank_0(parameter.detach(), ranks)
                taken[parameter] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            part.register_parameter(name, taken[parameter])


def _from_rank_0(tensor: Tensor, ranks: Ranks) -> Tensor:
    is_here = ranks.rank == 0
    shape, dtype = tensor.shape, tensor.dtype
    whole = tensor.to(ranks.device) if is_here else torch.empty(shape, dtype=dtype, device=ranks.device)
    dist.broadcast(whole.contiguous(), src=0)
    return whole
