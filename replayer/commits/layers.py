"""Find the first layer whose output differs when one step of two records is replayed.

    replay up to the step ─> hooks on every module ─> one checksum per output, in the order of the calls ─> compare two such lists

Modules are listed as they finish, so the innermost one that differs comes first. The difference
arises in the first call whose input is still equal and whose output is not.

`on_commit` imports this file beside the packages of another commit: it uses little of them.
"""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from recorder.documents import checksum

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from areal_core.trainer.observed import Observer
    from areal_core.trainer.rl import PPOTrainer
    from recorder import Record
    from replayer.request import Request
    from replayer.run import MakeObserver


@dataclass(frozen=True)
class Call:
    """One forward of a module.

    Attributes:
        name: of the module in the model; "" is the model.
        input, output: crc32c of the first tensor.
        kind, file, line: the module's class, its file from its package's folder, and the first line
            of its forward; None if they are not known.
        functions: what the forward called in the traced folder, but for inner modules, each as
            "file:line:name".
    """

    name: str
    input: str | None
    output: str | None
    kind: str | None = None
    file: str | None = None
    line: int | None = None
    functions: tuple[str, ...] = ()


def first_tensor(value: Any) -> "Tensor | None":
    import torch  # not at the top: commands import this file

    if isinstance(value, torch.Tensor):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return next((found for item in items if (found := first_tensor(item)) is not None), None)


def tensor_checksum(value: Any) -> str | None:
    """Return the crc32c of the first tensor's bytes, None if there is none."""
    import torch

    tensor = first_tensor(value)
    if tensor is None:
        return None
    return checksum(tensor.detach().contiguous().cpu().view(torch.uint8).numpy())


def described(module: "torch.nn.Module") -> tuple[str, str | None, int | None]:
    """Return the class of a module that defines its forward, its file and the forward's first line.

    The file is named from its package's folder. FSDP puts classes of its own before that one.
    """
    import torch

    cls = next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), torch.nn.Identity)
    code = getattr(inspect.unwrap(vars(cls)["forward"]), "__code__", None)
    if code is None:
        return cls.__name__, None, None
    levels = cls.__module__.count(".") + 1
    return cls.__name__, "/".join(code.co_filename.split(os.sep)[-levels:]), code.co_firstlineno


class Tracer:
    """Collects the calls of a model's modules, with the functions below `folder` that they call."""

    def __init__(self, folder: str) -> None:
        self.folder = folder.rstrip(os.sep) + os.sep
        self.calls: list[Call] = []
        self._open: list[set[str]] = []  # functions called in each unfinished module, outermost first
        self._handles: list[Any] = []

    def start(self, model: "torch.nn.Module") -> None:
        """Observe every module from now on."""
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._begin))
            self._handles.append(module.register_forward_hook(self._end_of(name), with_kwargs=True))
        sys.setprofile(self._note_function)

    def stop(self) -> None:
        """Remove everything that `start` added."""
        sys.setprofile(None)
        for handle in self._handles:
            handle.remove()

    def _note_function(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and self._open and code.co_filename.startswith(self.folder):
            path = code.co_filename[len(self.folder) :]
            if code.co_filename != __file__:
                self._open[-1].add(f"{path}:{code.co_firstlineno}:{code.co_qualname}")

    def _begin(self, module: "torch.nn.Module", arguments: Any) -> None:
        self._open.append(set())

    def _end_of(self, name: str) -> Callable[..., None]:
        def end(module: "torch.nn.Module", arguments: Any, keywords: Any, result: Any) -> None:
            functions = tuple(sorted(self._open.pop() if self._open else ()))
            given, found = tensor_checksum((arguments, keywords)), tensor_checksum(result)
            self.calls.append(Call(name, given, found, *described(module), functions))

        return end


def trace_layers(step: int, on_calls: Callable[[list[list[Call]]], None], folder: str = "") -> "MakeObserver":
    """Return the factory of an observer that passes every rank's calls to rank 0's `on_calls`.

    Args:
        folder: the functions that are called in files below it are listed.
    """

    def make(record: "Record", trainer: "PPOTrainer", request: "Request") -> "Observer":
        tracer = Tracer(folder or os.getcwd())

        def observe(event: str, **facts: Any) -> None:
            if event == "batch" and facts["step"] == step:
                tracer.start(trainer.actor.model)
            elif event == "step" and facts["step"] == step:
                tracer.stop()
                gathered = trainer.ranks.gather_objects(tracer.calls)  # a collective
                if trainer.ranks.rank == 0:
                    on_calls(gathered)

        return observe

    return make


@dataclass(frozen=True)
class LayersReport:
    """Where the first difference between two replays of a step arises.

    Attributes:
        rank, index, num_calls: the call, counted from 0, of how many of its rank.
        name: the module; None if no call differs.
        input_differs: no call with an equal input differs: the cause is before the model.
        kind, file, line: the module's class and its file; where the commits are known and a
            function that the module calls was changed between them, that function's.
        with_current_code: sides, of "A" and "B", that ran with the current code in place of their
            own, because their commit is not known here.
    """

    step: int
    rank: int
    index: int
    num_calls: int
    name: str | None
    input_differs: bool
    kind: str | None = None
    file: str | None = None
    line: int | None = None
    with_current_code: tuple[str, ...] = ()


def compare_calls(step: int, left: Sequence[Sequence[Call]], right: Sequence[Sequence[Call]]) -> LayersReport:
    """Return the earliest call of any rank in which a difference arises.

    If no call has an equal input and another output, it is the first that differs at all.
    """
    found = first_difference(left, right)
    if found is None:
        num_calls = max((len(calls) for calls in left), default=0)
        return LayersReport(step, 0, num_calls, num_calls, None, input_differs=False)
    rank, index = found
    a, b = left[rank][index], right[rank][index]
    name, differs = a.name or "the model", a.input != b.input
    return LayersReport(step, rank, index, len(left[rank]), name, differs, b.kind, b.file, b.line)


def first_difference(
    left: Sequence[Sequence[Call]], right: Sequence[Sequence[Call]]
) -> tuple[int, int] | None:
    """Return rank and index of the call that `compare_calls` reports, None if all are equal."""
    found = [
        (rank, index, a.name == b.name and a.input == b.input)
        for rank, calls in enumerate(zip(left, right, strict=False))
        for index, (a, b) in enumerate(zip(*calls, strict=False))
        if (a.name, a.input, a.output) != (b.name, b.input, b.output)
    ]
    arising = [item for item in found if item[2]] or found
    return min(arising, key=lambda item: item[1])[:2] if arising else None
