"""Replacement of `sgl_kernel`, whose wheel needs a CUDA driver, in SGLang servers on the CPU.

Dense models on the torch-native path import its names but call none. A call raises with its name.
Model files of SGLang that read an operator of `torch.ops.sgl_kernel` while they are imported find
it in `operators.py`; every other operator stays absent, because SGLang asks by `hasattr` whether
the CPU has AMX kernels. Adapters on that path request pinned memory, and what keeps the experts of
tokens registers its memory with CUDA. Both need a driver: here they get ordinary memory, which is
equivalent on a CPU. A server that releases its memory waits for the current accelerator, which a
build of torch for CUDA says it has without a driver: here it is the CPU.
"""

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from .operators import IMPLEMENTED, READ_AT_IMPORT


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a compiled kernel that this CPU server lacks")

    return missing


def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return make(*args, **kwargs)

    return made


def pin_memory(self: Any, device: Any = None) -> Any:
    return self


def synchronize(device: Any = None) -> None:
    """Do nothing. It is not `torch.cpu.synchronize`: torch.compile refuses one function twice."""


# Registering ordinary memory succeeds, and does nothing.
REGISTERED = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
torch.cuda.cudart = lambda: REGISTERED
torch.tensor, torch.zeros = unpinned(torch.tensor), unpinned(torch.zeros)
torch.cuda.synchronize = synchronize
torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign]  # on purpose
for name in READ_AT_IMPORT:
    setattr(torch.ops.sgl_kernel, name, IMPLEMENTED.get(name) or __getattr__(name))
