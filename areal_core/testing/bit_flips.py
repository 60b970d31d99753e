"""Flip one bit of what a rank computes in a step: the ground truth of who computed wrongly.

An observer of the trainer's events: in its step, on its rank, a dispatch mode flips the bit in the
result of an operator, or in what a collective is given.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from areal_core.engine.observe_bits import INTEGERS
from areal_core.engine.reduction import local_of
from areal_core.trainer.observed import Observer
from areal_core.trainer.rl import PPOTrainer

PRODUCTS = ("aten.mm", "aten.addmm")


@dataclass(frozen=True)
class Flip:
    """Where a bit is flipped.

    Args:
        kind: "output" of a linear module, "gradient" of its weight, what is "sent" to sum gradients
            over ranks, or the optimizer's "state" of the weight (its first moment).
        module: name of the linear module; not for "sent".
        call: the micro-batch, counted from 0 in the step; for "sent", the collective; for "state",
            the minibatch.
        element: position in the tensor, modulo its size.
        bit: of that element.
        repeats: also at every later call of the step.
    """

    kind: Literal["output", "gradient", "sent", "state"]
    step: int
    rank: int
    module: str = ""
    call: int = 0
    element: int = 0
    bit: int = 30
    repeats: bool = False


def flip_bit(tensor: Tensor, element: int, bit: int) -> None:
    """Flip a bit of an element, in place."""
    size = tensor.element_size()
    integers = tensor.view(INTEGERS[size])
    index: list[int] = []
    for length in reversed(tensor.shape):
        element, position = divmod(element, length)
        index.insert(0, position)
    mask = (1 << bit) - ((1 << 8 * size) if bit == 8 * size - 1 else 0)  # as a signed number
    integers[tuple(index)] ^= mask


class FlippingMode(TorchDispatchMode):
    """Flips the bit whenever the flip's operator runs, once or each time."""

    def __init__(self, flip: Flip, module: nn.Module | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flip, self.module = flip, module
        self.calls, self.done = -1, 0  # forwards of the module, flips
        self.is_inside = False  # of its forward
        self.nodes = range(0)  # of autograd that the forward has made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        if self.flip.kind == "sent" and "reduce_scatter" in name:
            self.calls += 1
            if self.is_due():
                self.apply(args[1] if isinstance(args[1], Tensor) else args[1][0])
        result = func(*args, **(kwargs or {}))
        if name.startswith(PRODUCTS) and self.is_due() and self.is_wanted(result):
            self.apply(result)
        return result

    def is_due(self) -> bool:
        late = self.calls > self.flip.call and self.flip.repeats
        return late or (self.calls == self.flip.call and (not self.done or self.flip.repeats))

    def is_wanted(self, result: Tensor) -> bool:
        """Return whether a matrix product is the module's output, or its weight's gradient."""
        if self.flip.kind == "output":
            return self.is_inside
        node = torch._C._current_autograd_node()
        if self.flip.kind != "gradient" or node is None or self.module is None:
            return False
        shape = self.module.get_parameter("weight").shape
        return node._sequence_nr() in self.nodes and result.shape in (shape, shape[::-1])

    def apply(self, tensor: Tensor) -> None:
        self.done += 1
        flip_bit(tensor, self.flip.element, self.flip.bit)

    def begin(self, module: nn.Module, arguments: Any) -> None:
        """Note that the module's forward begins."""
        if torch.is_grad_enabled():
            self.calls, self.is_inside = self.calls + 1, True
            self.first = torch.zeros((), requires_grad=True).clone().grad_fn._sequence_nr()  # type: ignore[union-attr]

    def end(self, module: nn.Module, arguments: Any, output: Tensor) -> None:
        if self.is_inside:
            self.is_inside = False
            self.nodes = range(self.first, output.grad_fn._sequence_nr() + 1)  # type: ignore[union-attr]


def plant(flip: Flip) -> Callable[[PPOTrainer], Observer]:
    """Return the factory of an observer that flips the bit."""

    def make(trainer: PPOTrainer) -> Observer:
        module = trainer.actor.model.get_submodule(flip.module) if flip.module else None
        mode, handles = FlippingMode(flip, module), []

        def observe(event: str, **facts: Any) -> None:
            if facts.get("step") != flip.step or trainer.ranks.rank != flip.rank:
                return
            if event == "advantages" and flip.kind != "state":
                if module is not None:
                    handles.append(module.register_forward_pre_hook(mode.begin, prepend=True))
                    handles.append(module.register_forward_hook(mode.end, prepend=True))
                mode.__enter__()  # type: ignore[no-untyped-call]
            elif event == "gradients" and (flip.kind, flip.call) == ("state", facts["minibatch"]):
                assert module is not None
                assert trainer.actor.optimizer is not None
                state = trainer.actor.optimizer.state[module.get_parameter("weight")]
                flip_bit(local_of(state["exp_avg"]), flip.element, flip.bit)
            elif event == "step" and flip.kind != "state":
                mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                for handle in handles:
                    handle.remove()

        return observe

    return make
