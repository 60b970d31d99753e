"""A step as bytes for a page: a JSON head, then its columns as typed arrays, all in one gzip stream.

    uint32 size of the head | head, padded to 8 bytes | column | column | ...        (little-endian; columns begin at 8 bytes)

The head lists each column's name, kind, type and length in order; the page makes typed arrays of them without a copy.
"""

import gzip
import json

import numpy as np

from areal_debug.view_data import StepView

TYPES = {"float32": "Float32Array", "int32": "Int32Array", "uint32": "Uint32Array", "uint16": "Uint16Array"}
TYPES |= {"uint8": "Uint8Array", "int8": "Int8Array"}
ALIGNMENT = 8
LEVEL = 5  # of gzip; 9 takes three times as long for two percent


def pack_step(view: StepView) -> bytes:
    """The whole step, compressed."""
    columns = {("row", name): array for name, array in view.rows.items()}
    columns |= {("token", name): narrowed(array) for name, array in view.tokens.items()}
    columns["token", "index"] = narrowed(view.text.index)
    head = {
        "step": view.step,
        "version": view.version,
        "texts": view.text.texts,
        "ids": view.text.ids,
        "recorded": view.recorded_text,
        "missing": view.missing,
        "columns": [
            {"kind": kind, "name": name, "type": TYPES[array.dtype.name], "length": len(array)}
            for (kind, name), array in columns.items()
        ],
    }
    encoded = json.dumps(head, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    encoded += b" " * (-(4 + len(encoded)) % ALIGNMENT)
    parts = [len(encoded).to_bytes(4, "little"), encoded]
    for array in columns.values():
        data = array.astype(array.dtype.newbyteorder("<")).tobytes()
        parts += [data, bytes(-len(data) % ALIGNMENT)]
    return gzip.compress(b"".join(parts), LEVEL, mtime=0)


def narrowed(array: np.ndarray) -> np.ndarray:
    """Integers in the narrowest type of the page that holds them."""
    if array.dtype.kind == "f" or not len(array):
        return array
    low, high = int(array.min()), int(array.max())
    for name in ("uint8", "int8", "uint16"):
        limits = np.iinfo(name)
        if limits.min <= low and high <= limits.max:
            return array.astype(name)
    return array
