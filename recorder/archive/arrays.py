"""Read one-dimensional arrays of an archive's zarr store: exactly the kind that `columns` writes.

zarr itself would read any codec that its packages know, some of which unpickle, and would allocate
what an array's metadata demands. Here the metadata must be that of zarr v3, one dimension, a
known dtype, and shards of at most 16 MiB with zstd or blosc chunks of at most 256 KiB, each with a
crc32c, before a chunk is read; every read and every buffer is bounded by these sizes.
"""

import json
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from crc32c import crc32c
from numcodecs import blosc, zstd

from recorder.archive.objects import Objects, read_object
from recorder.errors import DamagedRecord
from recorder.format import NUMPY_TYPES

CHUNK_BYTES = 1 << 18  # decompressed to read one token
SHARD_CHUNKS = 64  # 16 MiB of tensors an object
METADATA_BYTES = 1 << 20  # most of a zarr.json
CRC_BYTES = 4
ABSENT = 2**64 - 1  # in a shard's index: the chunk is all zeros and not stored
DTYPES = {dtype.name: dtype for dtype in NUMPY_TYPES.values()}
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}
KEYS = {"name": "default", "configuration": {"separator": "/"}}


@dataclass
class ArchivedArray:
    """One array. `chunk` and `shard` are numbers of elements."""

    objects: Objects
    name: str
    dtype: np.dtype[Any]
    length: int
    chunk: int
    shard: int
    compressor: str
    indexes: dict[int, np.ndarray] = field(default_factory=dict)
    last: tuple[int, bytearray] | None = None  # documents of consecutive steps share a chunk

    def read(self, offset: int, count: int) -> bytearray:
        """Return the bytes of `count` elements from element `offset`. Raises DamagedRecord."""
        found = bytearray()
        try:
            if not 0 <= offset <= offset + count <= self.length:
                raise ValueError(f"elements {offset} to {offset + count} of {self.length} are wanted")
            for number in range(offset // self.shard, -(-(offset + count) // self.shard)):
                begin = number * self.shard
                low, high = max(offset - begin, 0), min(offset + count - begin, self.shard)
                found += b"".join(self.shard_bytes(number, low, high)) if low < high else b""
        except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
            what = f"{self.name} of the archive cannot be read: {error}"
            raise DamagedRecord(f"{self.name}/zarr.json", what) from None
        return found

    def shard_bytes(self, number: int, low: int, high: int) -> Iterator[memoryview]:
        size = self.dtype.itemsize
        index = self.index(number)
        for chunk in range(low // self.chunk, -(-high // self.chunk)):
            begin = chunk * self.chunk
            data = self.chunk_bytes(number, chunk, index)
            yield memoryview(data)[max(low - begin, 0) * size : min(high - begin, self.chunk) * size]

    def index(self, number: int) -> np.ndarray | None:
        """Return [chunks, 2] offsets and sizes of a shard, None if the shard is not stored."""
        if number in self.indexes:
            return self.indexes[number]
        name = f"{self.name}/c/{number}"
        size_bytes = self.objects.size(name)
        if size_bytes is None:
            return None
        num_chunks = self.shard // self.chunk
        index_bytes = 16 * num_chunks + CRC_BYTES
        most = 2 * self.shard * self.dtype.itemsize + index_bytes
        if not index_bytes <= size_bytes <= most:
            raise ValueError(f"shard {number} has {size_bytes} bytes, {index_bytes} to {most} expected")
        data = checked(
            self.objects.read(name, size_bytes - index_bytes, index_bytes), f"index of shard {number}"
        )
        index = np.frombuffer(data, "<u8").reshape(num_chunks, 2)
        begins, sizes = index[index[:, 0] != ABSENT].T
        room = size_bytes - index_bytes
        if (sizes > room).any() or (begins > room - sizes).any():
            raise ValueError(f"the index of shard {number} points outside of it")
        self.indexes[number] = index
        return index

    def chunk_bytes(self, number: int, chunk: int, index: np.ndarray | None) -> bytearray:
        position = number * (self.shard // self.chunk) + chunk
        if self.last is not None and self.last[0] == position:
            return self.last[1]
        chunk_size = self.chunk * self.dtype.itemsize
        data = bytearray(chunk_size)
        if index is not None and index[chunk, 0] != ABSENT:
            begin, size_bytes = map(int, index[chunk])
            stored = self.objects.read(f"{self.name}/c/{number}", begin, size_bytes)
            decompress(self.compressor, checked(stored, f"chunk {chunk} of shard {number}"), data)
        self.last = (position, data)
        return data


def checked(data: bytes | bytearray, what: str) -> memoryview:
    """Return the data without the crc32c at its end. Raises ValueError unless it matches."""
    view = memoryview(data)
    content, stored = view[:-CRC_BYTES], view[-CRC_BYTES:]
    if len(stored) != CRC_BYTES or struct.unpack("<I", stored)[0] != crc32c(content):
        raise ValueError(f"the {what} does not match its crc32c")
    return content


def decompress(compressor: str, data: memoryview, into: bytearray) -> None:
    """Fill `into`. Raises ValueError or RuntimeError; both codecs refuse a larger content."""
    if compressor == "blosc":
        # header of blosc 1: sizes of the content, of a block and of the data
        num_bytes, _, size_bytes = struct.unpack_from("<III", data, 4) if len(data) >= 16 else (0, 0, 0)
        if (num_bytes, size_bytes) != (len(into), len(data)):
            raise ValueError(f"a chunk of {num_bytes} bytes, {len(into)} expected")
        blosc.decompress(data, into)
        return
    zstd.decompress(data, into)


def open_array(objects: Objects, name: str) -> ArchivedArray:
    """Open an array after checking its metadata. Raises DamagedRecord."""
    document = read_metadata(objects, name)
    try:
        if document is None or document["node_type"] != "array":
            raise ValueError("the archive has no such array")
        return parse_array(document, objects, name)
    except (ValueError, KeyError, TypeError) as error:
        what = f"is not an array that `record archive` writes ({type(error).__name__}: {error})"
        raise DamagedRecord(f"{name}/zarr.json", what) from None


def read_metadata(objects: Objects, name: str) -> dict[str, Any] | None:
    """Read the zarr.json of a group or array, which must be zarr v3; None if there is none."""
    file = f"{name}/zarr.json" if name else "zarr.json"
    data = read_object(objects, file, METADATA_BYTES)
    if data is None:
        return None
    try:
        document = json.loads(data)
        if document["zarr_format"] != 3 or document["node_type"] not in ("group", "array"):
            raise ValueError(f"zarr format {document['zarr_format']!r}, only 3 is read")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedRecord(file, f"is not readable ({type(error).__name__}: {error})") from None
    return document


def parse_array(document: dict[str, Any], objects: Objects, name: str) -> ArchivedArray:
    """Parse the metadata of an array. Raises ValueError, KeyError, TypeError."""
    dtype = DTYPES[document["data_type"]]
    (length,) = document["shape"]
    grid, (sharding,) = document["chunk_grid"], document["codecs"]
    (shard,), (chunk,) = grid["configuration"]["chunk_shape"], sharding["configuration"]["chunk_shape"]
    sizes = (length, shard, chunk)
    if not all(type(size) is int and 0 <= size < 2**53 for size in sizes) or not chunk or shard % chunk:
        raise ValueError(f"length, shard and chunk {sizes}")
    if chunk * dtype.itemsize > CHUNK_BYTES or not 0 < shard // chunk <= SHARD_CHUNKS:
        raise ValueError(f"chunks of {chunk} and shards of {shard} elements are larger than written ones")
    encode, compressor, *crc = sharding["configuration"]["codecs"]
    if (
        grid["name"] != "regular"
        or sharding["name"] != "sharding_indexed"
        or sharding["configuration"]["index_codecs"] != [LITTLE, CRC]
        or sharding["configuration"].get("index_location", "end") != "end"
        or encode not in (LITTLE, {"name": "bytes"})
        or compressor["name"] not in ("zstd", "blosc")
        or crc != [CRC]
    ):
        raise ValueError(f"codecs {json.dumps(document['codecs'])[:500]}")
    if (
        document["fill_value"]
        or document["chunk_key_encoding"] != KEYS
        or document.get("storage_transformers")
    ):
        raise ValueError("another fill value, naming of chunks or transformation than written ones have")
    return ArchivedArray(objects, name, dtype, length, chunk, shard, compressor["name"])
