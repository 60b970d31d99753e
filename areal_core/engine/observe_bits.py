"""Collect sums of the bits (`bit_sums.py`) of all that a rank computes for an optimizer step.

forward   output of each module ─> log-probs ─> loss
backward  gradient of each output, of each weight (whole, before ranks are summed) ─> what is sent
step      reduced gradients: this rank's shards
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from areal_core.engine.bit_sums import Sums
from areal_core.engine.gloo_order import padded_size
from areal_core.engine.ranks import Ranks
from areal_core.engine.reduction import is_sharded, local_of, own_weights, reduction_of

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_sums(tensor: Tensor) -> Tensor:
    """Return the three sums of a tensor, int64 [3] on its device; of its local shard if sharded."""
    local = local_of(tensor).detach()
    bits = local.view(INTEGERS[local.element_size()])
    table = bits.reshape(-1, bits.shape[-1]) if bits.dim() else bits.reshape(1, 1)
    rows = table.sum(1, dtype=torch.int64)
    columns = table.sum(0, dtype=torch.int64)
    weighted = [(sums * torch.arange(len(sums), device=sums.device)).sum() for sums in (rows, columns)]
    return torch.stack([rows.sum(), *weighted])


class BitSums:
    """Collects the sums of one pass over the micro-batches of an optimizer step, on this rank.

    Modules with parameters of their own are observed; of compiled layers only the layer. What a
    process computes for another of its virtual ranks is left out.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self.model, self.ranks = model, ranks
        self.collected: list[tuple[str, tuple[int, ...], Tensor]] = []
        self.ends: list[int] = []  # entries before the end of each micro-batch
        # what FSDP gathers, and sums over ranks, at once
        self.weights = {m: own_weights(name, m) for name, m in model.named_modules() if is_sharded(m)}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Observe what the body computes."""
        self.collected, self.ends = [], []
        hooked: dict[Parameter, Any] = {}
        handles: list[Any] = []
        for name, module in observed_modules(self.model):
            handles.append(module.register_forward_hook(partial(self._after, name)))
        for module in self.weights:
            # after FSDP's own hook, when the weights are whole
            handles.append(module.register_forward_pre_hook(partial(self._hook_weights, hooked)))
            if not self.ranks.is_virtual:
                reduction_of(module).note = partial(self._note_sent, module)
        try:
            yield
        finally:
            for handle in (*handles, *hooked.values()):
                handle.remove()
            for module in self.weights:
                reduction_of(module).note = None

    def note(self, place: str, tensor: Tensor) -> None:
        """Add the sums of a tensor."""
        if not self.ranks.has_turn:
            return
        local = local_of(tensor)
        self.collected.append((place, tuple(local.shape), bit_sums(local)))

    def end_micro_batch(self) -> None:
        """Close the list of a micro-batch; what follows belongs to the next one."""
        self.ends.append(len(self.collected))

    def note_reduced(self) -> None:
        """Add the reduced gradients, after the last micro-batch; not shards of fewer ranks."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and not self.ranks.is_virtual:
                self.note(f"reduced gradient of {name}", parameter.grad)

    def of_weights(self) -> list[Sums]:
        """Return the sums of this rank's shards of the trained weights; waits for the device."""
        self.collected, self.ends = [], []
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and not self.ranks.is_virtual:
                self.note(f"updated weight {name}", parameter)
        return self.read()[-1]

    def read(self) -> list[list[Sums]]:
        """Return the sums of each micro-batch, and last those of the step; waits for the device."""
        numbers = torch.stack([sums for _, _, sums in self.collected]).tolist() if self.collected else []
        found = [
            Sums(place, shape, *row) for (place, shape, _), row in zip(self.collected, numbers, strict=True)
        ]
        bounds = [0, *self.ends, len(found)]
        return [found[a:b] for a, b in pairwise(bounds)]

    def _after(self, name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple | list) else output
        if isinstance(tensor, Tensor):
            self.note(f"output of {name}", tensor)
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: self.note(f"gradient of the output of {name}", grad))

    def _hook_weights(self, hooked: dict[Parameter, Any], module: nn.Module, arguments: Any) -> None:
        for name, owner, attribute in self.weights[module]:
            weight = getattr(owner, attribute)
            if weight.requires_grad and weight not in hooked:
                hooked[weight] = weight.register_hook(partial(self.note, f"gradient of {name}"))

    def _note_sent(self, module: nn.Module, sent: Tensor, num_ranks: int) -> None:
        """Add what this rank sends to be summed: the padded rows of each weight, by rank."""
        flat, at = sent.view(num_ranks, -1), 0
        shapes = [(name, getattr(owner, a)) for name, owner, a in self.weights[module]]
        sizes = [(name, padded_size(w.shape, num_ranks)) for name, w in shapes if w.requires_grad]
        if sum(size for _, size in sizes) != flat.shape[1]:  # a weight without a gradient is left out
            sizes = [(f"{len(sizes)} weights such as {sizes[0][0]}", flat.shape[1])]
        for name, size in sizes:
            self.note(f"sent gradient of {name}", flat[:, at : at + size])
            at += size


def observed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers, and the modules with parameters of their own that no compiled layer has."""
    layers = {module for module in model.modules() if is_sharded(module) and module is not model}
    # `compile_layers` gives the layer another forward
    compiled = {part for layer in layers if "forward" in vars(layer) for part in layer.modules()}
    for name, module in model.named_modules():
        has_weights = next(module.parameters(recurse=False), None) is not None
        if module in layers or (has_weights and module not in compiled):
            yield name, module
