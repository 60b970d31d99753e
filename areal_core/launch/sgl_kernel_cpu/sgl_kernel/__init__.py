"""Stands in for `sgl_kernel`, whose wheel needs a CUDA driver to import, in SGLang servers on the CPU.

Dense models on the torch-native path import its names but call none. A call says which one it was.
"""

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a CUDA kernel; this server runs on the CPU")

    return missing
