"""A padded batch as one safetensors file and back: flat, ragged, checksummed.

    [B, T] int32, bool mask  ->  [tokens] in the narrowest integer type, cu_seqlens [B + 1] int64, no padding

safetensors is eight bytes of header length, a JSON header and raw buffers without gaps. Writing it
here instead of through its library computes the checksum of each tensor on the way and makes no
copy.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from areal_core.safety.durable import write_durably
from recorder.documents import checksum
from recorder.errors import DamagedRecord, RecordError
from recorder.format import (
    BATCH_KEYS,
    IMAGE_DATA,
    IMAGE_KEYS,
    NUMPY_TYPES,
    UNKNOWN_BITS,
    BatchEntry,
    TensorEntry,
)
from recorder.storage import Storage

BITS_ONLY = {"torch.bfloat16": "BF16", "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2"}
NAMES = {dtype: name for name, dtype in NUMPY_TYPES.items() if name not in BITS_ONLY.values()}


@dataclass(frozen=True)
class FlatTensor:
    """A tensor ready to be written: `dtype` is the trainer's, `axis` as in TensorEntry.

    `image_data` has the axis `byte`; `pictures.hashed` replaces it before a file is written.
    """

    dtype: str
    axis: str
    array: np.ndarray


@dataclass(frozen=True)
class FlatBatch:
    """A batch without padding; `padded_length` is the trainer's T."""

    num_rows: int
    num_tokens: int
    padded_length: int
    tensors: dict[str, FlatTensor]


def as_array(value: Any) -> tuple[str, np.ndarray]:
    """Return safetensors dtype and NumPy array of a torch tensor (any device) or NumPy array."""
    if isinstance(value, np.ndarray):
        return NAMES[value.dtype], value
    tensor = value.detach().cpu().contiguous()
    if str(tensor.dtype) in BITS_ONLY:
        import torch

        bits = torch.int16 if tensor.element_size() == 2 else torch.uint8
        name = BITS_ONLY[str(tensor.dtype)]
        return name, tensor.view(bits).numpy().view(NUMPY_TYPES[name])
    array = tensor.numpy()
    return NAMES[array.dtype], array


def float32_of_bits(bits: np.ndarray) -> np.ndarray:
    """Return the numbers of bfloat16 bits, uint16, as float32, which is exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(array: np.ndarray) -> np.ndarray:
    """Convert integers to the narrowest type that fits; other dtypes are unchanged."""
    if array.dtype.kind not in "iu" or array.size == 0:
        return array
    low, high = int(array.min()), int(array.max())
    # a signed type has as many values below 0 as from 0
    narrowest = np.min_scalar_type(high if low >= 0 else min(low, -1 - high))
    return array.astype(narrowest) if narrowest.itemsize < array.dtype.itemsize else array


def without_padding(padded: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[B, T, ...] to [tokens, ...]."""
    # memcpy of row slices: a boolean index over [256, 8192] takes ten times as long
    none = padded[:0].reshape(0, *padded.shape[2:])
    return np.concatenate([none, *(row[:n] for row, n in zip(padded, lengths.tolist(), strict=True))])


def check_padding(key: str, padded: np.ndarray, lengths: np.ndarray) -> None:
    """Raise RecordError if the padding is not zero, because it could not be restored.

    Checks both ends of each row's padding, which any fill reaches: reading all of it would take as
    long as the rest of recording together.
    """
    rows = np.flatnonzero(lengths < padded.shape[1])
    if not len(rows):
        return
    bits = padded.view(f"u{padded.itemsize}")  # as integers, because -0.0 counts as zero
    if bits[rows, lengths[rows]].any() or bits[rows, -1].any():
        raise RecordError(
            f"batch[{key!r}] has padding that is not 0: set it to 0 where attention_mask is false"
        )


def sequence_lengths(attention_mask: Any) -> np.ndarray:
    """[B] int64 from a mask [B, T].

    Raises RecordError unless it is bool, true first and then false in each row.
    """
    dtype, mask = as_array(attention_mask)
    # row by row: counting along an axis takes three times as long
    rows = mask if dtype == "BOOL" and mask.ndim == 2 else None
    counts = None if rows is None else [np.count_nonzero(row) for row in rows]
    # counts again: `all` of a row takes four times as long
    if counts is None or [np.count_nonzero(row[:n]) for row, n in zip(mask, counts, strict=True)] != counts:
        raise RecordError(
            f"batch['attention_mask'] is {dtype} {mask.shape}: it must be bool [B, T], true first, then false"
        )
    return np.array(counts, np.int64)


def flatten(batch: Mapping[str, Any], any_padding: bool = False) -> FlatBatch:
    """Remove the padding of a batch (ARCHITECTURE.md, "The batch"). All arrays are copies.

    Keys of pictures have axes of their own (FORMAT.md). Of the others, those of shape [B, T, ...]
    are per token, and those of shape [B, ...] per row. `attention_mask`
    [B, T] bool gives the lengths and is not stored. Padding must be zero unless `any_padding`.
    Raises RecordError for a mask that is not bool and right-padded, and for any other shape.
    """
    lengths = sequence_lengths(batch["attention_mask"])
    mask_shape = (len(lengths), batch["attention_mask"].shape[1])
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tensors = {"cu_seqlens": FlatTensor("I64", "offset", cu_seqlens)}
    for key in sorted(set(batch) - {"attention_mask"}):
        dtype, array = as_array(batch[key])
        if key == IMAGE_DATA or key in IMAGE_KEYS:
            tensors[key] = FlatTensor(dtype, IMAGE_KEYS.get(key, "byte"), array.copy())
        elif array.shape[:2] == mask_shape:
            flat = without_padding(array, lengths)
            if not any_padding:
                check_padding(key, array, lengths)
            tensors[key] = FlatTensor(dtype, "token", flat if dtype in BITS_ONLY.values() else narrow(flat))
        elif array.shape[:1] == mask_shape[:1]:
            tensors[key] = FlatTensor(dtype, "row", array.copy())
        else:
            raise RecordError(
                f"batch[{key!r}] has shape {array.shape}: neither per token {mask_shape} nor per row"
            )
    return FlatBatch(len(lengths), int(cu_seqlens[-1]), mask_shape[1], tensors)


def with_unknown(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the keys of every batch that this one lacks, as unknown: rows of a dataset have no reward.

    `batch` has at least `input_ids`, `loss_mask`, `attention_mask`, `prompt_id` and `sample_id`.
    """
    missing = BATCH_KEYS.keys() - batch.keys() - {"cu_seqlens"}
    if not missing:
        return batch
    trained, held = as_array(batch["loss_mask"])[1] != 0, as_array(batch["attention_mask"])[1]
    num_rows = len(held)
    values = {
        "logprobs": np.where(trained, np.float32(np.nan), np.float32(0)),
        "versions": np.where(held, np.int32(-1), np.int32(0)),
        "rewards": np.full(num_rows, np.nan, np.float32),
        "finish_reason": np.zeros(num_rows, np.int32),
    }
    bits = sum(bit for key, bit in UNKNOWN_BITS.items() if key not in batch)
    others = {"prompt_length": np.zeros(num_rows, np.int64), "unknown": np.full(num_rows, bits, np.uint8)}
    return {**batch, **{key: values[key] for key in missing}, **others}


def stored_type(tensor: FlatTensor) -> str:
    return tensor.dtype if tensor.array.dtype == NUMPY_TYPES[tensor.dtype] else NAMES[tensor.array.dtype]


def header_bytes(tensors: dict[str, FlatTensor], begins: dict[str, int]) -> bytes:
    """Return the safetensors header; `begins` count from its end."""
    header = {
        name: {
            "dtype": stored_type(tensor),
            "shape": tensor.array.shape,
            "data_offsets": (begins[name], begins[name] + tensor.array.nbytes),
        }
        for name, tensor in tensors.items()
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_batch(path: Path, batch: FlatBatch) -> BatchEntry:
    """Write the safetensors file durably and return its entry for step.json."""
    # widest type first, then by name, as in the safetensors library: buffers are aligned
    tensors = dict(sorted(batch.tensors.items(), key=lambda item: (-item[1].array.itemsize, item[0])))
    sizes = [tensor.array.nbytes for tensor in tensors.values()]
    begins = dict(zip(tensors, accumulate(sizes, initial=0), strict=False))
    head = header_bytes(tensors, begins)
    buffers = {name: tensor.array.reshape(-1).view(np.uint8) for name, tensor in tensors.items()}
    write_durably(path, head, *buffers.values())
    entries = {
        name: TensorEntry(
            dtype=tensor.dtype,
            stored=stored_type(tensor),
            shape=tensor.array.shape,
            axis=tensor.axis,
            offset=len(head) + begins[name],
            size_bytes=tensor.array.nbytes,
            crc32c=checksum(buffers[name]),
        )
        for name, tensor in tensors.items()
    }
    return BatchEntry(
        size_bytes=len(head) + sum(sizes),
        header_bytes=len(head),
        header_crc32c=checksum(head),
        num_rows=batch.num_rows,
        num_tokens=batch.num_tokens,
        padded_length=batch.padded_length,
        tensors=entries,
    )


def read_bytes(storage: Storage, file: str, offset: int, size_bytes: int) -> np.ndarray:
    """Read [size_bytes] uint8 of a file. Raises DamagedRecord if it is absent or shorter."""
    data = storage.read(file, offset, size_bytes)
    if len(data) != size_bytes:
        if storage.size(file) is None:
            raise DamagedRecord(file, "is missing")
        raise DamagedRecord(
            file, f"ends at byte {offset + len(data)}, {offset + size_bytes} expected: it is cut off"
        )
    return np.frombuffer(data, np.uint8)


def checked_bytes(storage: Storage, file: str, name: str, entry: TensorEntry) -> np.ndarray:
    """Read [size_bytes] uint8 of one tensor and check its checksum. Raises DamagedRecord."""
    buffer = read_bytes(storage, file, entry.offset, entry.size_bytes)
    if checksum(buffer) != entry.crc32c:
        raise DamagedRecord(file, f"bytes do not match their crc32c {entry.crc32c}", name)
    return buffer


def check_offsets(file: str, cu_seqlens: np.ndarray, entry: BatchEntry) -> None:
    """Raise DamagedRecord unless int64 [rows + 1] offsets ascend from 0 to the number of tokens."""
    lengths = np.diff(cu_seqlens)
    ends = (int(cu_seqlens[0]), int(cu_seqlens[-1]))
    if ends != (0, entry.num_tokens) or (lengths < 0).any() or (lengths > entry.padded_length).any():
        raise DamagedRecord(file, f"does not divide {entry.num_tokens} tokens into rows", "cu_seqlens")


def read_tensor(storage: Storage, file: str, name: str, entry: TensorEntry) -> np.ndarray:
    """Read one tensor in the trainer's dtype (bits for bfloat16). Raises DamagedRecord."""
    buffer = checked_bytes(storage, file, name, entry)
    array = buffer.view(NUMPY_TYPES[entry.stored]).reshape(entry.shape)
    return array.astype(NUMPY_TYPES[entry.dtype], copy=False)


def check_size(storage: Storage, file: str, expected: int) -> None:
    """Raise DamagedRecord unless a file is there and has so many bytes."""
    size_bytes = storage.size(file)
    if size_bytes is None:
        raise DamagedRecord(file, "is missing")
    if size_bytes != expected:
        raise DamagedRecord(file, f"has {size_bytes} bytes, {expected} expected: it is cut off or changed")


def check_header(storage: Storage, file: str, entry: BatchEntry) -> None:
    """Raise DamagedRecord unless size and safetensors header match."""
    check_size(storage, file, entry.size_bytes)
    if checksum(read_bytes(storage, file, 0, entry.header_bytes)) != entry.header_crc32c:
        raise DamagedRecord(
            file, f"safetensors header does not match its crc32c {entry.header_crc32c}", "(header)"
        )
