"""Read an untrusted pickle with stand-ins, importing nothing it names.

The rules are those of `areal_core/safety/unpickle.py`; here are the stand-ins of tensors and
arrays. `import_record` reads in a confined child, which limits memory and time.
"""

import errno
import io
import itertools
import pickletools
import zipfile
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from areal_core.safety.printable import printable
from areal_core.safety.received import MOST_BYTES, open_received, read_received
from areal_core.safety.unpickle import RestrictedUnpickler
from recorder.errors import UnfinishedFile, UnsafePickle
from recorder.trainers.stand_ins import (
    TORCH_TYPES,
    Array,
    BytesFile,
    DType,
    Instance,
    Storage,
    find_stand_in,
)

NUMBERS = 16  # lists of at least this many numbers become arrays
FREE_VALUES, VALUES_PER_BYTE = 10_000, 10
FIRST_BYTES = 1 << 22  # enough for `first_strings`
ZIP = b"PK\x03\x04"  # first bytes of a zip file; zipfile would also accept one inside a pickle


class TensorUnpickler(RestrictedUnpickler):
    """An unpickler of stand-ins; `tensors` is the zip file of `torch.save` with the storages."""

    def __init__(self, file: BinaryIO, tensors: zipfile.ZipFile | None = None, prefix: str = "") -> None:
        super().__init__(file, stand_in_or_storage)
        self.tensors, self.prefix = tensors, prefix
        self.storages: dict[str, Storage] = {}

    def persistent_load(self, pid: Any) -> Storage:
        """Read a storage of the zip file: `("storage", type, key, device, number of elements)`."""
        if self.tensors is None or not isinstance(pid, tuple) or pid[0] != "storage":
            raise UnsafePickle("it refers to data outside of the file")
        _, dtype, key, *_ = pid
        if key not in self.storages:
            self.storages[key] = Storage(dtype, self.tensors.read(f"{self.prefix}/data/{key}"))
        return self.storages[key]


def stand_in_or_storage(module: str, name: str) -> Any:
    is_storage = (module, name) == ("torch.storage", "_load_from_bytes")
    return load_storage if is_storage else find_stand_in(module, name)


class StorageUnpickler(TensorUnpickler):
    """An unpickler of a storage in the format of torch before 1.6, whose data follow the pickle."""

    def persistent_load(self, pid: Any) -> Storage:
        _, dtype, key, *_ = pid
        return self.storages.setdefault(key, Storage(dtype))


def load_storage(data: bytes) -> Storage:
    file = io.BytesIO(data)
    for _ in ("magic number", "version", "system"):
        TensorUnpickler(file).load()
    unpickler = StorageUnpickler(file)
    storage = unpickler.load()
    for key in TensorUnpickler(file).load():
        found = unpickler.storages[key]
        found.data = file.read(int.from_bytes(file.read(8), "little") * TORCH_TYPES[found.dtype].itemsize)
    return storage


def read_any(data: bytes) -> Any:
    """Read a pickle or a file of `torch.save`; nested pickles remain bytes. Raises UnsafePickle."""
    if not data.startswith(ZIP):
        return TensorUnpickler(io.BytesIO(data)).load()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise UnsafePickle("it is a compressed zip file, which torch does not write")
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise UnsafePickle("it is a zip file, and not one of torch.save")
        prefix = pickles[0].removesuffix("/data.pkl")
        with archive.open(pickles[0]) as file:
            return TensorUnpickler(io.BytesIO(file.read()), archive, prefix).load()


@dataclass
class Plain:
    """Turns what an unpickler built into plain data, of at most `values_left` more values.

    A pickle of n bytes creates at most n values, but it may refer to one of them many times, and to
    what refers to it many times: nine lists of ten become a billion values when they are unfolded.
    """

    values_left: int

    def value(self, value: Any) -> Any:
        """Return scalars, text, bytes, lists, dicts, arrays and Instances. Raises UnsafePickle."""
        self.values_left -= 1
        if self.values_left < 0:
            raise UnsafePickle("it has far more values than allowed for a file of its size")
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return value
        if isinstance(value, np.ndarray):
            return value if value.dtype.kind != "U" else self.value(value.tolist())
        if isinstance(value, bytearray | BytesFile):
            return bytes(value if isinstance(value, bytearray) else value.data)
        if isinstance(value, Array):
            return self.value(value.values)
        if isinstance(value, list | tuple | set | frozenset):
            numbers = as_numbers(value)
            return [self.value(item) for item in value] if numbers is None else numbers
        if isinstance(value, dict):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, Instance):
            return Instance(value.name, tuple(self.value(value.arguments)), self.value(value.state))
        if isinstance(value, DType):
            return value.code
        return Instance(getattr(value, "__name__", type(value).__name__))


def as_numbers(values: Collection[Any]) -> np.ndarray | None:
    """Convert a long list of ints (int64) or floats (float64) to an array, else None."""
    kinds = set(map(type, values)) if len(values) >= NUMBERS else set()
    if kinds == {int} and min(values) >= -(2**63) and max(values) < 2**63:
        return np.array(list(values), np.int64)
    return np.array(list(values), np.float64) if kinds == {float} else None


def load_pickle(path: Path) -> Any:
    """Read a pickle or a file of `torch.save` without running anything that it names.

    Returns:
        Scalars, strings, bytes, lists, dicts, arrays (also for tensors and long lists of numbers),
            and Instances.

    Raises:
        UnsafePickle: it needs a name that is not allowed, has too many values, or is broken.
        UnfinishedFile: it is cut off.
    """
    return load_bytes(read_received(path, MOST_BYTES), str(path))


def load_bytes(data: bytes, name: str) -> Any:
    """Call `load_pickle` on the content of a file, or on a pickle nested in another."""
    try:
        return Plain(FREE_VALUES + VALUES_PER_BYTE * len(data)).value(read_any(data))
    except UnsafePickle as error:
        raise UnsafePickle(f"{name} is refused: {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # a broken or hostile pickle may raise any exception
        if isinstance(error, EOFError | zipfile.BadZipFile) or "truncated" in str(error):
            raise UnfinishedFile(f"{name} is cut off or damaged") from None
        what = f"it cannot be read ({type(error).__name__}: {printable(str(error))})"
        raise UnsafePickle(f"{name} is refused: {what}") from None


def is_cut_off(path: Path) -> bool:
    """Return whether a file is empty, or begins as one of `torch.save` and does not end as one."""
    with open_received(path) as file:
        return file.read(4) in (b"", ZIP) and not zipfile.is_zipfile(path)


def first_of_zip(path: Path) -> bytes:
    """Return the first bytes of the pickle of a `torch.save` file, none if there is no pickle.

    Raises BadZipFile and what else `zipfile` raises for a damaged file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return archive.open(pickles[0]).read(FIRST_BYTES) if pickles else b""
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise zipfile.BadZipFile("it names a place before its start") from None


def first_strings(path: Path, num_opcodes: int = 20_000) -> set[str]:
    """Return strings of the first opcodes of a pickle or `torch.save` file; nothing is executed.

    Enough to distinguish formats, of large files as well; empty for any other file.
    """
    found = set()
    with open_received(path) as file:
        data = file.read(FIRST_BYTES)
    with suppress(ValueError, KeyError, NotImplementedError, RuntimeError, EOFError, zipfile.BadZipFile):
        if data.startswith(ZIP):
            data = first_of_zip(path)
        for _, argument, _ in itertools.islice(pickletools.genops(data), num_opcodes):
            if isinstance(argument, str):
                found.add(argument)
    return found
