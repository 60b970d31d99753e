"""Stand-ins that the restricted unpickler builds instead of the classes and functions in a pickle.

A pickle is a program whose only dangerous instructions import a name and call it. Here every name
that an importer needs has a stand-in of plain data; any other name ends the read with an error that
names it. No code of torch, of NumPy's pickle support or of a framework runs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recorder.errors import UnsafePickle
from recorder.tensors import float32_of_bits

TORCH_TYPES: dict[str, np.dtype[Any]] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int16": np.dtype("<i2"),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
    "bool": np.dtype("?"),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
    "uint64": np.dtype("<u8"),
}
STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
FREE_ELEMENTS = 1 << 20  # of an expanded tensor, beyond its storage
NUMPY_KINDS = "biufSU"  # numbers and strings; "O" (objects) arrives as a list


@dataclass
class Instance:
    """An object of a class that is not imported: its name, constructor arguments and state."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Drop an item of a class derived from dict: its state has the content again."""


@dataclass
class DType:
    """A NumPy dtype in a pickle: `code` is its type string without byte order."""

    code: str
    byteorder: str = "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.byteorder = state[1]

    def numpy(self) -> np.dtype[Any]:
        """Return the dtype, which must be of numbers or strings."""
        order = self.byteorder if self.byteorder in "<>" else "="
        dtype = np.dtype(self.code).newbyteorder(order)  # type: ignore[arg-type]
        if dtype.kind not in NUMPY_KINDS:
            raise UnsafePickle(f"it holds an array of numpy type {self.code!r}")
        return dtype


@dataclass
class Array:
    """A NumPy array in a pickle; `values` is an ndarray, or a list for an array of objects."""

    values: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, data = state
        if isinstance(data, list):  # of objects
            self.values = data
        else:
            self.values = as_shape(np.frombuffer(data, dtype.numpy()), shape, "F" if is_fortran else "C")


@dataclass
class BytesFile:
    """An `io.BytesIO` in a pickle."""

    data: bytes = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.data = bytes(state[0])


@dataclass
class Storage:
    """The memory of tensors: element type and bytes."""

    dtype: str
    data: bytes = field(repr=False, default=b"")


def as_shape(flat: np.ndarray, shape: Any, order: str) -> np.ndarray:
    return flat.reshape(tuple(shape), order=order)  # type: ignore[call-overload]


def from_buffer(buffer: Any, dtype: DType, shape: Any, order: str) -> Array:
    """NumPy's `_frombuffer`, which protocol 5 uses."""
    return Array(as_shape(np.frombuffer(buffer, dtype.numpy()), shape, order))


def latin_bytes(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise UnsafePickle(f"it encodes text as {encoding!r}")
    return text.encode("latin-1")


def rebuild_tensor(
    storage: Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> np.ndarray:
    """torch's `_rebuild_tensor_v2`: a copied view of a storage; bfloat16 as float32 (exact)."""
    flat = np.frombuffer(storage.data, TORCH_TYPES[storage.dtype])
    shape, strides = tuple(map(int, shape)), tuple(map(int, strides))
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if math.prod(shape) and not (offset >= 0 and min(strides, default=0) >= 0 and last < len(flat)):
        raise UnsafePickle("a tensor reaches beyond its storage")
    if math.prod(shape) > FREE_ELEMENTS + len(flat):  # strides of 0 repeat an element
        raise UnsafePickle(f"a tensor of {math.prod(shape)} elements has a storage of {len(flat)}")
    view = np.lib.stride_tricks.as_strided(
        flat[offset:], shape, [stride * flat.itemsize for stride in strides]
    )
    values = np.ascontiguousarray(view)
    return float32_of_bits(values) if storage.dtype == "bfloat16" else values


def rebuild_typed(
    storage: Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *rest: Any
) -> np.ndarray:
    """torch's `_rebuild_tensor_v3`: the type is the third of the further arguments."""
    return rebuild_tensor(Storage(rest[2], storage.data), offset, shape, strides)


def rebuild_consolidated(metadata: Mapping[str, Any], storage: np.ndarray) -> dict[str, Any]:
    """Rebuild tensordict's consolidated form: one uint8 tensor, and the layout of each leaf in it.

    A leaf is (dtype, shape, begin, end, whether it is padded).
    """
    found: dict[str, Any] = {}
    for key, (dtype, shape, begin, end, *_) in metadata["leaves"].items():
        name = str(dtype).removeprefix("torch.")
        values = np.frombuffer(storage[begin:end].tobytes(), TORCH_TYPES[name])
        values = values[: math.prod(shape)].reshape(tuple(shape))
        found[key] = float32_of_bits(values) if name == "bfloat16" else values
    for key, value in metadata["non_tensors"].items():
        found[key] = value[0] if isinstance(value, tuple) else value
    return found


def rebuild_jagged(kwargs: Mapping[str, Any]) -> list[np.ndarray]:
    """torch's `_rebuild_njt`: rows of different lengths, one after another in `values`."""
    values, offsets = np.asarray(kwargs["values"]), np.asarray(kwargs["offsets"])
    lengths = kwargs.get("lengths")
    ends = offsets[1:] if lengths is None else offsets[:-1] + np.asarray(lengths)
    return [values[begin:end] for begin, end in zip(offsets, ends, strict=False)]


def make_instance(name: str) -> Any:
    """Create a class whose objects are Instances; a class, because a pickle may call `__new__`."""

    def new(cls: type, *arguments: Any) -> Instance:
        return Instance(name, arguments)

    return type(name, (), {"__new__": new})


def numpy_names(module: str) -> dict[str, Callable[..., Any]]:
    return {
        f"{module}.multiarray._reconstruct": lambda *_: Array(),
        f"{module}.multiarray.scalar": lambda dtype, data=b"": np.frombuffer(data, dtype.numpy())[0].item(),
        f"{module}.numeric._frombuffer": from_buffer,
    }


def plain_dict(*arguments: Any) -> dict[Any, Any]:
    items = [argument for argument in arguments if isinstance(argument, list | dict)]
    return dict(*items)


ALLOWED: dict[str, Any] = {
    "builtins.set": list,
    "builtins.frozenset": list,
    "builtins.list": list,
    "builtins.dict": dict,
    "builtins.int": int,
    "builtins.float": float,
    "builtins.complex": complex,
    "collections.OrderedDict": plain_dict,
    "collections.defaultdict": plain_dict,
    "copyreg._reconstructor": lambda cls, base, state: cls(),
    "builtins.object": object,
    "_codecs.encode": latin_bytes,
    "_io.BytesIO": BytesFile,
    "numpy.ndarray": Array,
    "numpy.dtype": lambda code, *_: DType(code),
    **numpy_names("numpy.core"),
    **numpy_names("numpy._core"),
    "torch._utils._rebuild_tensor_v2": rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": rebuild_typed,
    "torch.storage.UntypedStorage": "uint8",
    "torch._tensor._rebuild_from_type_v2": lambda rebuild, cls, arguments, state: rebuild(*arguments),
    "torch.nested._internal.nested_tensor._rebuild_njt": rebuild_jagged,
    "torch.Size": tuple,
    "torch.device": lambda *name: ":".join(map(str, name)),
    **{f"torch.{name}": dtype for name, dtype in STORAGES.items()},
    **{f"torch.{dtype}": dtype for dtype in TORCH_TYPES},
    "tensordict._reductions._rebuild_tensordict_files_consolidated": rebuild_consolidated,
    "tensordict._reductions._make_td": lambda _, state: dict(state["_tensordict"]),
    "tensordict.utils._StringOnlyDict": dict,
    "verl.utils.tensordict_utils._rebuild_tensordict_files_consolidated_ragged_idx": rebuild_consolidated,
}
# classes that are named and never used
UNUSED = (
    "torch.Tensor",
    "torch.nested._internal.nested_tensor.NestedTensor",
    "torch._dynamo.decorators._DimRange",
)
ALLOWED |= {name: make_instance(name) for name in UNUSED}
OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # names in protocols 0 to 2
# Any other name of these packages becomes an Instance: data without code.
PACKAGES = ("slime", "miles", "verl", "roll", "skyrl", "skyrl_train", "xtuner", "areal", "tensordict", "PIL")


def find_stand_in(module: str, name: str) -> Any:
    """Return the stand-in of a class or function.

    Raises UnsafePickle, which names it, if there is none.
    """
    module = OLD_MODULES.get(module, module)
    full_name = f"{module}.{name}"
    if full_name in ALLOWED:
        return ALLOWED[full_name]
    if module.split(".")[0] in PACKAGES and "." not in name:
        return make_instance(full_name)
    raise UnsafePickle(f"it needs {full_name}, which no importer allows")
