"""Find values that are not finite, without waiting for the GPU.

The largest absolute value of each tensor, NaN if it contains one, is copied to the host in the
background, and looked at when it has arrived: the report may come a step later and names the step
that it is about. Only the first finding of each kind is reported, so that one NaN, which is
everywhere a step later, gives a few lines.
"""

import functools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from areal_core.errors import NonFiniteError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

P = ParamSpec("P")
NAMES_SHOWN = 3
KINDS = {  # to what stands before a name
    "output": "output of ",
    "loss": "",
    "statistic": "statistic ",
    "gradient": "gradient of ",
    "weight": "weight ",
}


@dataclass(frozen=True)
class Pending:
    """The largest absolute values [names] of some tensors, on their way to the host."""

    step: int
    kind: str
    names: Sequence[str]
    largest: "Tensor"
    arrived: "torch.cuda.Event | None"


def harmless(
    check: Callable[Concatenate["FiniteCheck", P], None],
) -> Callable[Concatenate["FiniteCheck", P], None]:
    """Let a check not stop the run: one that fails is reported, and is the last."""

    @functools.wraps(check)
    def run(self: "FiniteCheck", /, *args: P.args, **options: P.kwargs) -> None:
        try:
            if not self.is_off:
                check(self, *args, **options)
        except NonFiniteError:
            raise
        except Exception as error:
            self.is_off = True
            self.report(f"values are no longer checked: {type(error).__name__}: {error}")

    return run


class FiniteCheck:
    """Check numbers and tensors of one rank.

    Args:
        report: gets one sentence per finding.
        raises: raise NonFiniteError for a finding, except for statistics, which may be undefined.
    """

    def __init__(self, report: Callable[[str], None], raises: bool) -> None:
        self.report, self.raises = report, raises
        self.pending: list[Pending] = []
        self.found: Counter[str] = Counter()
        self.names: dict[int, str] = {}  # of parameters, by id
        self.is_off = False
        self.step_of_gradients = -1

    @harmless
    def step(self, step: int, numbers: Mapping[str, Any], model: "nn.Module | None") -> None:
        """Check the loss and statistics of a step, and the tensors of a model."""
        for name, value in numbers.items():
            kind = "loss" if name == "loss" else "statistic"
            if is_tensor(value):
                self._start(step, kind, [(name, value)])
            elif not math.isfinite(number := number_of(value) or 0.0):
                self._finding(step, kind, [f"{name} ({number})"])
        if model is not None:
            named = self._named(model)
            if self.step_of_gradients < step:
                self._start(step, "gradient", [(name, p.grad) for name, p in named if p.grad is not None])
            self._start(step, "weight", named)
        self._look()

    @harmless
    def gradients(self, step: int, optimizer: Any) -> None:
        """Check the gradients that an optimizer is about to use."""
        self.step_of_gradients = step
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kind = type(optimizer).__name__
        unnamed = (f"parameter {i} {list(p.shape)} of {kind}" for i, p in enumerate(parameters))
        named = [(self.names.get(id(p), name), p.grad) for p, name in zip(parameters, unnamed, strict=True)]
        self._start(step, "gradient", [(name, grad) for name, grad in named if grad is not None])
        self._look()

    def watch_modules(self, model: "nn.Module", step: Callable[[], int]) -> list[Callable[[], object]]:
        """Check the outputs of all modules of a model; return what ends it."""
        self._named(model)

        def hook_of(name: str) -> Callable[..., None]:
            return lambda module, inputs, output: self.outputs(step(), name, output)

        return [m.register_forward_hook(hook_of(name)).remove for name, m in model.named_modules() if name]

    @harmless
    def outputs(self, step: int, name: str, output: Any) -> None:
        """Check the tensors that a module has computed."""
        self._start(step, "output", [(name, tensor) for tensor in tensors_in(output)])

    @harmless
    def finish(self, may_raise: bool) -> None:
        """Report what is still on its way, and how many further findings there were."""
        self.raises = self.raises and may_raise
        self._look(wait=True)
        further = sum(self.found.values()) - len(self.found)
        if further:
            self.report(f"{further} further values were not finite")

    def _named(self, model: "nn.Module") -> "list[tuple[str, nn.Parameter]]":
        named = list(model.named_parameters())
        self.names |= {id(parameter): name for name, parameter in named}
        return named

    def _start(self, step: int, kind: str, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        """Compute the largest absolute values, and copy them to the host."""
        import torch

        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return  # a CUDA graph would repeat the check
        alike: dict[Any, list[tuple[str, Tensor]]] = defaultdict(list)
        for name, tensor in tensors:
            local = tensor.detach()
            local = local.to_local() if hasattr(local, "to_local") else local  # of DTensor: our shard
            local = local._values() if local.is_sparse else local
            if local.numel() and not local.is_meta and (local.is_floating_point() or local.is_complex()):
                alike[local.device, local.dtype].append((name, local))
        for (device, _), group in alike.items():
            largest = torch.stack(torch._foreach_norm([tensor for _, tensor in group], math.inf))
            event = None
            if device.type == "cuda":
                host = torch.empty(largest.shape, dtype=largest.dtype, pin_memory=True)
                largest = host.copy_(largest, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
            self.pending.append(Pending(step, kind, [name for name, _ in group], largest.cpu(), event))

    def _look(self, wait: bool = False) -> None:
        while self.pending:
            first = self.pending[0]
            if first.arrived is not None:
                if wait:
                    first.arrived.synchronize()
                elif not first.arrived.query():
                    return
            del self.pending[0]
            bad = (~first.largest.isfinite()).nonzero()[:, 0].tolist()
            if bad:
                self._finding(
                    first.step, first.kind, [f"{first.names[i]} ({first.largest[i].item()})" for i in bad]
                )

    def _finding(self, step: int, kind: str, bad: Sequence[str]) -> None:
        self.found[kind] += 1
        more = f" and {len(bad) - NAMES_SHOWN} more" if len(bad) > NAMES_SHOWN else ""
        text = f"step {step}: not finite: {KINDS[kind]}{', '.join(bad[:NAMES_SHOWN])}{more}"
        if self.found[kind] == 1:
            self.report(text)
        if self.raises and kind != "statistic":
            raise NonFiniteError(text)


def is_tensor(value: Any) -> bool:
    """Return whether a value is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def number_of(value: Any) -> float | None:
    """Return a number, or that of a tensor with one; None for anything else."""
    try:
        return float(value.detach() if is_tensor(value) else value)
    except (TypeError, ValueError, RuntimeError):
        return None


def tensors_in(value: Any) -> "Iterable[Tensor]":
    """Yield the tensors of a module's output: of tuples, lists and mappings, too."""
    if is_tensor(value):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
