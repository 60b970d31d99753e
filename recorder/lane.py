"""Appends to arrays of a zarr group: the compressed columns of an archive.

A shard is one object of the store and is written once: a packed lane fills shards before it writes them, any other begins a new one at
every append, so that what is committed is never written again.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

from recorder.archive import Part
from recorder.tensors import NUMPY_TYPES

CHUNK_BYTES = 1 << 18  # decompressed to read one token
SHARD_CHUNKS = 64  # 16 MiB of tensors an object
FLOATS = ("F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2")


def compressors(stored: str, level: int) -> tuple[Any, ...]:
    """Integers as they are and floats byte by byte, then zstd, then crc32c.

    Measured on text of GSM8K under SmolLM2-135M, bytes a token: ids 0.79 (1.03 shuffled), logprobs where every token is trained 3.42
    at level 7 and 3.64 at level 3 (3.71 with bits shuffled), mask 0.01.
    """
    if stored in FLOATS:
        size = NUMPY_TYPES[stored].itemsize
        return (
            BloscCodec(cname="zstd", clevel=min(level, 7), shuffle="shuffle", typesize=size),
            Crc32cCodec(),
        )
    return (ZstdCodec(level=level), Crc32cCodec())


@dataclass
class Column:
    """One array of a lane. `end` is where the next element goes; `held` were appended and are not in the store yet."""

    array: zarr.Array[Any]
    shard: int
    end: int = 0
    held: list[np.ndarray] = field(default_factory=list)
    num_held: int = 0


@dataclass
class Lane:
    """Appends to arrays of its own in a zarr group. `packed` fills shards before it writes them, otherwise each `append` writes."""

    group: zarr.Group
    name: str
    packed: bool
    level: int = 9
    columns: dict[str, Column] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)  # objects of the store, for whoever must wait for the disk

    def append(self, name: str, stored: str, data: Any) -> Part:
        """Appends bytes of `stored` elements to the array `name` and says where they are."""
        path = f"{self.name}/{name}"
        values = np.frombuffer(data, NUMPY_TYPES[stored])
        if path not in self.columns:
            self.columns[path] = self.create(path, stored)
        column = self.columns[path]
        part = Part(path, column.end + column.num_held, len(values), stored)
        if self.packed:
            column.held.append(values)
            column.num_held += len(values)
            if column.num_held >= column.shard:
                self.write_held(column, whole_shards=True)
        elif len(values):
            self.write(column, values)
            column.end = round_up(column.end, column.shard)
        return part

    def create(self, path: str, stored: str) -> Column:
        """An empty array that grows."""
        dtype = NUMPY_TYPES[stored]
        chunk = CHUNK_BYTES // dtype.itemsize
        array = self.group.create_array(
            path,
            shape=(0,),
            dtype=dtype,
            chunks=(chunk,),
            shards=(chunk * SHARD_CHUNKS,),
            compressors=compressors(stored, self.level),
            fill_value=0,
        )
        return Column(array, chunk * SHARD_CHUNKS)

    def write_held(self, column: Column, whole_shards: bool) -> None:
        """Writes what is held, the last unfinished shard only at the end, because a shard is written once."""
        values = np.concatenate(column.held)
        kept = len(values) % column.shard if whole_shards else 0
        self.write(column, values[: len(values) - kept])
        column.held, column.num_held = [values[len(values) - kept :]], kept

    def write(self, column: Column, values: np.ndarray) -> None:
        """Writes elements at the end, growing the array by doubling: each growth rewrites its metadata."""
        begin, end = column.end, column.end + len(values)
        if end > column.array.shape[0]:
            column.array.resize((max(end, 2 * column.array.shape[0]),))
        column.array[begin:end] = values
        column.end = end
        shards = range(begin // column.shard, -(-end // column.shard))
        self.written |= {f"{column.array.path}/zarr.json", *(f"{column.array.path}/c/{n}" for n in shards)}

    def close(self) -> None:
        """Writes what is held and cuts the arrays to their length."""
        for column in self.columns.values():
            if column.num_held:
                self.write_held(column, whole_shards=False)
            column.array.resize((column.end,))


def round_up(number: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step
