"""A pickle reader that imports nothing: names become stand-ins that the caller allows, or an error.

A pickle is a program whose only dangerous instructions import a name and call it. The unpickler is
C code that calls no function but stand-ins, so a hostile file can do no more than take memory and
time, which the child process that reads what others wrote limits.
"""

import pickle
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn


class UnsafePickle(ValueError):
    """A pickle needs a name that is not allowed, or data outside of the file."""


def no_names(module: str, name: str) -> NoReturn:
    """Allow no class and no function: plain data only."""
    raise UnsafePickle(f"it needs {module}.{name}, which is no plain data")


class RestrictedUnpickler(pickle.Unpickler):
    """An unpickler that asks `stand_in(module, name)` in place of each import."""

    def __init__(self, file: BinaryIO, stand_in: Callable[[str, str], Any] = no_names) -> None:
        super().__init__(file)
        self.stand_in = stand_in

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name. Raises `UnsafePickle`."""
        return self.stand_in(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """Refuse references to data outside of the pickle."""
        raise UnsafePickle("it refers to data outside of the file")
