"""Offloading to host memory: optimizer states between steps, and an engine while it is idle.

```
optimizer.offload            states are on the device during the optimizer step, else in host memory
fsdp.per_layer_optim_step    the same, one layer at a time: at most the states of one layer are on the device
offload                      parameters and states are in host memory while the engine is idle
fsdp.offload_params          FSDP's own: all state stays in host memory, layers are copied to the device
```

Results are bitwise the same with and without. On a CPU, memory of the device is host memory too, so
that offloading saves nothing; an idle engine leaves it all the same.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

HOST = torch.device("cpu")


def take_step(optimizer: Optimizer, groups: Sequence[Sequence[nn.Parameter]] | None) -> None:
    """Take one optimizer step.

    Args:
        groups: the parameters, in groups whose states are on the device one group at a time; None
            where all states stay on the device.
    """
    if groups is None:
        optimizer.step()
        return
    gradients = {parameter: parameter.grad for group in groups for parameter in group}
    for parameter in gradients:
        parameter.grad = None  # the optimizer skips parameters without a gradient
    for group in groups:
        move_states(optimizer, group, None)
        for parameter in group:
            parameter.grad = gradients[parameter]
        optimizer.step()
        for parameter in group:
            parameter.grad = None
        move_states(optimizer, group, HOST)
    for parameter, gradient in gradients.items():
        parameter.grad = gradient  # observers read it


def step_groups(model: nn.Module, *, is_per_layer: bool) -> list[list[nn.Parameter]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not is_per_layer:
        return [trained]
    layers = [part for part in model.modules() if isinstance(part, FSDPModule) and part is not model]
    in_layers = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]
    seen = {parameter for group in in_layers for parameter in group}
    return [*in_layers, [parameter for parameter in trained if parameter not in seen]]


def move_states(optimizer: Optimizer, parameters: Iterable[Tensor], device: torch.device | None) -> None:
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})  # empty before the first step
        target = parameter.device if device is None else device
        state.update((name, value.to(target)) for name, value in state.items() if torch.is_tensor(value))


@dataclass(frozen=True)
class Offloaded:
    """Memory of the device that was released, and a copy of its bytes in host memory."""

    storage: UntypedStorage
    copy: UntypedStorage


def leave_device(model: nn.Module, optimizer: Optimizer | None, device: torch.device) -> list[Offloaded]:
    """Copy weights, buffers and optimizer states to host memory, and release their device memory.

    Tensors stay what they are, without memory until `return_to_device`. Gradients are dropped.
    """
    if optimizer is not None:
        optimizer.zero_grad()
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # a forward without a backward leaves weights gathered
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # other streams may still read the weights
    offloaded = []
    for storage in storages(model, optimizer, device):
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=device.type == "cuda")
        offloaded.append(Offloaded(storage, copy.untyped_storage().copy_(storage, non_blocking=False)))
        storage.resize_(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return offloaded


def return_to_device(offloaded: Iterable[Offloaded]) -> None:
    for item in offloaded:
        item.storage.resize_(item.copy.nbytes())
        item.storage.copy_(item.copy, non_blocking=False)


def storages(model: nn.Module, optimizer: Optimizer | None, device: torch.device) -> list[UntypedStorage]:
    """Return the memory of weights, buffers and optimizer states on a device, each once."""
    tensors = [*model.parameters(), *model.buffers()]
    if optimizer is not None:
        tensors += [value for state in optimizer.state.values() for value in state.values()]
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        if torch.is_tensor(tensor):
            detached = tensor.detach()
            local = detached.to_local() if isinstance(detached, DTensor) else detached
            storage = local.untyped_storage()
            # On a CPU, memory that numpy or a file provides cannot be released, and stays.
            if local.device.type == device.type and storage.nbytes() and storage.resizable():
                found[storage.data_ptr()] = storage
    return list(found.values())
