"""Find the first layer whose output differs when one step of two records is replayed.

    replay up to the step ─> hooks on every module ─> one checksum per output, in the order of the calls ─> compare two such lists

Modules are listed as they finish, so the innermost one that differs comes first. The difference
arises in a layer whose input is still equal.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal_core.trainer.rl import Observer, PPOTrainer
from recorder import Record
from recorder.checksum_json import checksum
from replayer.request import Request
from replayer.run import MakeObserver


@dataclass(frozen=True)
class Call:
    """One forward of a module: its name, crc32c of the first tensor of input and output."""

    name: str
    input: str | None
    output: str | None


def first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor in a module's arguments or result, which may be nested."""
    if isinstance(value, Tensor):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return next((found for item in items if (found := first_tensor(item)) is not None), None)


def tensor_checksum(value: Any) -> str | None:
    """Return the crc32c of the first tensor's bytes, None if there is none."""
    tensor = first_tensor(value)
    if tensor is None:
        return None
    return checksum(tensor.detach().contiguous().cpu().view(torch.uint8).numpy())


def trace_layers(step: int, on_calls: Callable[[list[list[Call]]], None]) -> MakeObserver:
    """Return the factory of an observer that passes every rank's calls to rank 0's `on_calls`."""

    def make(record: Record, trainer: PPOTrainer, request: Request) -> Observer:
        calls: list[Call] = []
        handles: list[Any] = []

        def hook(name: str) -> Callable[..., None]:
            def note(module: object, arguments: Any, keywords: Any, result: Any) -> None:
                given = tensor_checksum((arguments, keywords))
                calls.append(Call(name, given, tensor_checksum(result)))

            return note

        def observe(event: str, **facts: Any) -> None:
            if event == "batch" and facts["step"] == step:
                for name, module in trainer.actor.model.named_modules():
                    handles.append(module.register_forward_hook(hook(name), with_kwargs=True))
            elif event == "step" and facts["step"] == step:
                for handle in handles:
                    handle.remove()
                gathered = trainer.ranks.gather_objects(calls)  # a collective
                if trainer.ranks.rank == 0:
                    on_calls(gathered)

        return observe

    return make


@dataclass(frozen=True)
class LayersReport:
    """The first call that differs, None if none does.

    `index` counts the `num_calls` calls of its rank from 0.

    `input_differs`: the input of that call differs already, so the cause is before the model.
    """

    step: int
    rank: int
    index: int
    num_calls: int
    name: str | None
    input_differs: bool


def compare_calls(step: int, left: Sequence[Sequence[Call]], right: Sequence[Sequence[Call]]) -> LayersReport:
    """Return the earliest call of any rank that differs.

    If the sequences of calls differ, it is the first call without an equal one on the other side.
    """
    firsts = [
        (index, rank, pair)
        for rank, calls in enumerate(zip(left, right, strict=False))
        for index, pair in differing(*calls)
    ]
    num_calls = max((len(calls) for calls in left), default=0)
    if not firsts:
        return LayersReport(step, 0, num_calls, num_calls, None, input_differs=False)
    index, rank, (a, b) = min(firsts, key=lambda found: found[:2])
    return LayersReport(step, rank, index, len(left[rank]), a.name or "the model", a.input != b.input)


def differing(left: Sequence[Call], right: Sequence[Call]) -> Iterator[tuple[int, tuple[Call, Call]]]:
    """Yield the first call that differs, with its index, if there is one."""
    for index, pair in enumerate(zip(left, right, strict=False)):
        if pair[0] != pair[1]:
            yield index, pair
            return
