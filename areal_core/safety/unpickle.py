"""A pickle reader that imports nothing: names become stand-ins that the caller allows, or an error.

A pickle is a program whose only dangerous instructions import a name and call it. The unpickler is
C code that calls no function but stand-ins, so a hostile file can do no more than take memory and
time, which the child process that reads what others wrote limits.
"""

import io
import pickle
import pickletools
from collections.abc import Callable, Iterator
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


def load_plain(data: bytes) -> Any:
    """Return the plain data of a pickle: no object. Raises `UnsafePickle`."""
    try:
        # The C code makes its memo as large as the largest place in it, which is at most a place an
        # opcode.
        if any(place > len(data) for place in places_in_memo(data)):
            raise UnsafePickle("it numbers more values than it has bytes")
        return RestrictedUnpickler(io.BytesIO(data)).load()
    except UnsafePickle:
        raise
    except Exception as error:  # a broken or hostile pickle may raise any exception
        raise UnsafePickle(f"it cannot be read ({type(error).__name__}: {error})") from error


def places_in_memo(data: bytes) -> Iterator[int]:
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            yield int(argument or 0)
