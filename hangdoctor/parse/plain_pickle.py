"""The plain data of a pickle that anybody may have written.

The C code makes its memo as large as the largest place in it, which is at most a place an opcode: a
few bytes can ask for all memory. Opcodes with arguments of a fixed size are passed in one match,
because stepping through them in Python takes ten times as long as loading them.
"""

import io
import pickletools
import re
from functools import cache
from typing import Any

from areal_core.safety.unpickle import RestrictedUnpickler, UnsafePickle

# Bytes of the size of an argument without a fixed one.
COUNTED = {b"\x8a": 1, b"U": 1, b"C": 1, b"\x8c": 1, b"T": 4, b"\x8b": 4, b"B": 4, b"X": 4,
           b"\x8e": 8, b"\x96": 8, b"\x8d": 8}  # fmt: skip


def load_plain(data: bytes) -> Any:
    """Return the plain data of a pickle: no object. Raises `UnsafePickle`."""
    try:
        operations = (o for o in pickletools.genops(data) if o[0].name in ("PUT", "BINPUT", "LONG_BINPUT"))
        if not has_small_memo(data) and any(int(place or 0) > len(data) for _, place, _ in operations):
            raise UnsafePickle("it numbers more values than it has bytes")
        return RestrictedUnpickler(io.BytesIO(data)).load()
    except UnsafePickle:
        raise
    except Exception as error:  # a broken or hostile pickle may raise any exception
        raise UnsafePickle(f"it cannot be read ({type(error).__name__}: {error})") from error


def has_small_memo(data: bytes) -> bool:
    """Return whether all places are below the number of bytes; False if that takes long."""
    run, at = fixed_opcodes(len(data).bit_length() - 1), 0
    while at < len(data):
        found = run.match(data, at)
        assert found is not None  # it matches nothing, too
        at = found.end()
        width = COUNTED.get(data[at : at + 1])
        if width is None:
            return data[at : at + 1] == b"."
        at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
    return False


@cache
def fixed_opcodes(place_bits: int) -> re.Pattern[bytes]:
    """Return a pattern of opcodes of fixed sizes, with places of at most `place_bits`."""
    sizes: dict[int, bytes] = {}
    for opcode in pickletools.opcodes:
        size = 0 if opcode.arg is None else opcode.arg.n
        if size >= 0 and opcode.name not in ("STOP", "LONG_BINPUT"):
            sizes[size] = sizes.get(size, b"") + opcode.code.encode("latin-1")
    kinds = [b"[%s].{%d}" % (re.escape(codes), size) for size, codes in sizes.items()]
    low, bits = divmod(min(place_bits, 31), 8)
    kinds.append(b"r.{%d}[\0-\\x%02x]\0{%d}" % (low, 2**bits - 1, 3 - low))
    return re.compile(b"(?s)(?:%s)*+" % b"|".join(kinds))
