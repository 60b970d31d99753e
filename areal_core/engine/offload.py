"""Offloading to host memory: optimizer states between steps, and an engine while it is idle.

```
optimizer.offload            states are on the device during the optimizer step, else in host memory
fsdp.per_layer_optim_step    the same, one layer at a time: at most the states of one layer are on the device
offload                      parameters and states are in host memory while the engine is idle
fsdp.offload_params          FSDP's own: all state stays in host memory, layers are copied to the device
```

Results are bitwise the same with and without. On a CPU nothing is moved.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
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
    """Return the trained parameters in one group, or one per layer and a last for the others."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not is_per_layer:
        return [trained]
    layers = [part for part in model.modules() if isinstance(part, FSDPModule) and part is not model]
    in_layers = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]
    seen = {parameter for group in in_layers for parameter in group}
    return [*in_layers, [parameter for parameter in trained if parameter not in seen]]


def move_states(optimizer: Optimizer, parameters: Iterable[Tensor], device: torch.device | None) -> None:
    """Move the states of some parameters to a device, or, with None, to that of each parameter."""
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})  # empty before the first step
        target = parameter.device if device is None else device
        state.update((name, value.to(target)) for name, value in state.items() if torch.is_tensor(value))


def leave_device(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Move parameters and optimizer states to host memory, and release the device's memory."""
    model.to(HOST)
    if optimizer is not None:
        move_states(optimizer, list(optimizer.state), HOST)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def return_to_device(
    model: nn.Module, optimizer: Optimizer | None, device: torch.device, *, with_states: bool
) -> None:
    """Invert `leave_device`; without states, which `take_step` then moves."""
    model.to(device)
    if optimizer is not None and with_states:
        move_states(optimizer, list(optimizer.state), None)
