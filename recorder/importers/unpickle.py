"""Read an untrusted pickle in a separate process with limits, importing nothing it names.

    importer ─> `python -m recorder.importers.unpickle FILE OUT` ─> OUT/tree.json, OUT/arrays.bin ─> importer
                 memory, time, size of output limited             plain JSON and numbers, no pickle

A name that is not allowed ends the process with a message, which `load_pickle` raises as
UnsafePickle.
"""

import io
import itertools
import json
import os
import pickle
import pickletools
import resource
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from recorder.errors import UnsafePickle
from recorder.importers.stand_ins import Array, BytesFile, DType, Instance, Storage, find_stand_in

REFUSED = 3  # exit code of the process
NUMBERS = 16  # lists of at least this many numbers are passed as arrays
CPU_SECONDS = 600
GIB = 1 << 30
ZIP = b"PK\x03\x04"  # first bytes of a zip file; zipfile would also accept one inside a pickle


class RestrictedUnpickler(pickle.Unpickler):
    """An unpickler that uses stand-ins instead of imports.

    `tensors` is the zip file of `torch.save` that has the storages.
    """

    def __init__(self, file: BinaryIO, tensors: zipfile.ZipFile | None = None, prefix: str = "") -> None:
        super().__init__(file)
        self.tensors, self.prefix = tensors, prefix
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name. Raises UnsafePickle."""
        return find_stand_in(module, name)

    def persistent_load(self, pid: Any) -> Storage:
        """Read a storage of the zip file: `("storage", type, key, device, number of elements)`."""
        if self.tensors is None or not isinstance(pid, tuple) or pid[0] != "storage":
            raise UnsafePickle("it refers to data outside of the file")
        _, dtype, key, *_ = pid
        if key not in self.storages:
            self.storages[key] = Storage(dtype, self.tensors.read(f"{self.prefix}/data/{key}"))
        return self.storages[key]


def read_any(data: bytes) -> Any:
    """Read a pickle or a file of `torch.save`; nested pickles remain bytes. Raises UnsafePickle."""
    if not data.startswith(ZIP):
        return RestrictedUnpickler(io.BytesIO(data)).load()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise UnsafePickle("it is a compressed zip file, which torch does not write")
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise UnsafePickle("it is a zip file, and not one of torch.save")
        prefix = pickles[0].removesuffix("/data.pkl")
        with archive.open(pickles[0]) as file:
            return RestrictedUnpickler(io.BytesIO(file.read()), archive, prefix).load()


@dataclass
class Output:
    """The output of the process: a file of arrays, and how many more values may be written.

    A pickle of n bytes creates at most n values, but it may refer to one of them many times, and to
    what refers to it many times: nine lists of ten become a billion values when they are written
    out.
    """

    arrays: BinaryIO
    values_left: int

    def put(self, values: np.ndarray) -> dict[str, Any]:
        """Write an array and return its location."""
        offset = self.arrays.tell()
        self.arrays.write(np.ascontiguousarray(values).data)
        return {"array": [values.dtype.str, list(values.shape), offset]}

    def encode(self, value: Any) -> Any:
        """Encode a value as JSON: scalars unchanged, others as an object with their kind as key."""
        self.values_left -= 1
        if self.values_left < 0:
            raise UnsafePickle("it has far more values than allowed for a file of its size")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.ndarray):
            return self.put(value) if value.dtype.kind != "U" else self.encode(value.tolist())
        if isinstance(value, bytes | bytearray):
            return {"bytes": self.put(np.frombuffer(value, np.uint8))["array"]}
        if isinstance(value, Array):
            return self.encode(value.values)
        if isinstance(value, BytesFile):
            return self.encode(value.data)
        if isinstance(value, list | tuple | set | frozenset):
            numbers = as_numbers(value)
            return {"list": [self.encode(item) for item in value]} if numbers is None else self.put(numbers)
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if isinstance(value, Instance):
            return {"object": [value.name, self.encode(value.arguments), self.encode(value.state)]}
        if isinstance(value, DType):
            return value.code
        return {"object": [getattr(value, "__name__", type(value).__name__), {"list": []}, None]}


def as_numbers(values: Collection[Any]) -> np.ndarray | None:
    """Convert a long list of ints (int64) or floats (float64) to an array, else None."""
    kinds = set(map(type, values)) if len(values) >= NUMBERS else set()
    if kinds == {int} and min(values) >= -(2**63) and max(values) < 2**63:
        return np.array(list(values), np.int64)
    return np.array(list(values), np.float64) if kinds == {float} else None


def limit(size_bytes: int) -> None:
    """Limit the resources of this process to what reading a file of that size needs."""
    resource.setrlimit(resource.RLIMIT_AS, (4 * GIB + 20 * size_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (GIB + 20 * size_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(file: str, out: str) -> None:
    """Read `file` and write its content to the folder `out`, or exit with REFUSED and a message."""
    data = Path(file).read_bytes()
    limit(len(data))
    try:
        with (Path(out) / "arrays.bin").open("wb") as arrays:
            tree = Output(arrays, 1_000_000 + 10 * len(data)).encode(read_any(data))
        (Path(out) / "tree.json").write_text(json.dumps(tree))
    except UnsafePickle as error:
        sentence = str(error)
    except MemoryError:
        sentence = "it needs more memory than allowed for a file of its size"
    except Exception as error:  # a broken or hostile pickle may raise any exception
        sentence = f"it cannot be read ({type(error).__name__}: {error})"
    else:
        return
    print(sentence, file=sys.stderr)
    sys.exit(REFUSED)


def load_pickle(path: Path) -> Any:
    """Read a pickle or a file of `torch.save` without running anything that it names.

    Returns:
        Scalars, strings, bytes, lists, dicts, arrays (also for tensors and long lists of numbers),
            and Instances.

    Raises:
        UnsafePickle: it needs a name that is not allowed, or exceeds a limit.
    """
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "recorder.importers.unpickle", str(path), out]
        # of the environment, only the search paths of Python
        kept = {
            name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ
        }
        done = subprocess.run(command, capture_output=True, text=True, env=kept | {"OMP_NUM_THREADS": "1"})
        if done.returncode == REFUSED:
            raise UnsafePickle(f"{path} is refused: {done.stderr.strip().splitlines()[-1]}")
        if done.returncode != 0:
            raise UnsafePickle(f"{path} is refused: reading it ended with code {done.returncode}")
        data = (Path(out) / "arrays.bin").read_bytes()
        return decode(json.loads((Path(out) / "tree.json").read_text()), data)


def decode(value: Any, data: bytes) -> Any:
    """Decode a value; the inverse of `Output.encode`."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "list":
        return [decode(item, data) for item in content]
    if kind == "dict":
        return {decode(key, data): decode(item, data) for key, item in content}
    if kind == "object":
        name, arguments, state = content
        return Instance(name, tuple(decode(arguments, data)), decode(state, data))
    dtype, shape, offset = content
    values = np.frombuffer(data, np.dtype(dtype), int(np.prod(shape)), offset).reshape(shape)
    return values.tobytes() if kind == "bytes" else values


def load_pickled_bytes(data: bytes) -> Any:
    """Call `load_pickle` on a pickle nested in another."""
    with tempfile.NamedTemporaryFile(suffix=".pkl") as file:
        file.write(data)
        file.flush()
        return load_pickle(Path(file.name))


def first_strings(path: Path, num_opcodes: int = 2000) -> set[str]:
    """Return strings of the first opcodes of a pickle or `torch.save` file; nothing is executed.

    Enough to distinguish formats; empty for any other file.
    """
    try:
        data = path.read_bytes()
        if data.startswith(ZIP):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                data = archive.read(pickles[0]) if pickles else b""
        opcodes = itertools.islice(pickletools.genops(data), num_opcodes)
        return {argument for _, argument, _ in opcodes if isinstance(argument, str)}
    except (ValueError, zipfile.BadZipFile):
        return set()


if __name__ == "__main__":
    main(*sys.argv[1:])
