"""Pictures by the sha256 of their bytes, which is the name of their file.

    trainer's batch   image_count [rows]   image_bytes [images]   image_data [bytes]
    recorded batch    image_count [rows]   image_bytes [images]   image_sha256 [images, 32]
    record            images/SHA256        each content once

The checksum of a picture is its name, and the names are in the batch, whose checksum is in
step.json.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from recorder.errors import DamagedRecord, RecordError
from recorder.format import (
    IMAGE_DATA,
    IMAGES_FOLDER,
    LARGEST_PICTURE,
    LARGEST_PICTURES,
    BatchEntry,
)
from recorder.storage import Storage
from recorder.tensors import FlatBatch, FlatTensor

PICTURE_NAME = re.compile(r"[0-9a-f]{64}")
Pictures = dict[str, memoryview]  # the bytes of each by its name


def picture_file(name: str) -> str:
    return f"{IMAGES_FOLDER}/{name}"


def picture_names(digests: np.ndarray) -> list[str]:
    """Return the names of uint8 [images, 32] digests."""
    return [row.tobytes().hex() for row in digests]


def hashed(batch: FlatBatch) -> tuple[FlatBatch, Pictures]:
    """Replace the bytes of pictures by their digests; return the bytes by name.

    Raises RecordError if counts and sizes do not add up, or a picture is too large.
    """
    if IMAGE_DATA not in batch.tensors:
        return batch, {}
    arrays = {key: tensor.array for key, tensor in batch.tensors.items()}
    data, sizes = arrays[IMAGE_DATA], arrays.get("image_bytes", np.zeros(0, np.int32)).astype(np.int64)
    counts = arrays.get("image_count", np.zeros(0, np.int32))
    if (int(counts.sum()), int(sizes.sum())) != (len(sizes), len(data)) or (sizes <= 0).any():
        raise RecordError(
            f"image_count counts {int(counts.sum())} pictures, image_bytes has {len(sizes)} with {int(sizes.sum())} bytes, "
            f"and image_data {len(data)} bytes: they must agree, and no picture is empty"
        )
    if len(sizes) and int(sizes.max()) > LARGEST_PICTURE:
        raise RecordError(
            f"a picture has {int(sizes.max())} bytes, at most {LARGEST_PICTURE} are recorded: give it smaller, or compressed"
        )
    ends = np.cumsum(sizes).tolist()
    each = [data.data[end - size : end] for end, size in zip(ends, sizes.tolist(), strict=True)]
    digests = [hashlib.sha256(picture).digest() for picture in each]
    array = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)
    tensors = {key: tensor for key, tensor in batch.tensors.items() if key != IMAGE_DATA}
    tensors["image_sha256"] = FlatTensor("U8", "image", array)
    names = [digest.hex() for digest in digests]
    return replace(batch, tensors=tensors), dict(zip(names, each, strict=True))


def with_pixels(batch: FlatBatch, processor: Any) -> FlatBatch:
    """Replace the bytes of pictures by what the trainer's processor makes of them.

    `processor` is the trainer's: `units(pictures)` returns the entries of each, `pixels(pictures)`
    their tensors, `pixel_values` [entries, ...] and others [pictures, ...].
    """
    if IMAGE_DATA not in batch.tensors:
        return batch
    from recorder.tensors import as_array

    arrays = {key: tensor.array for key, tensor in batch.tensors.items()}
    ends = np.cumsum(arrays["image_bytes"].astype(np.int64)).tolist()
    data = arrays[IMAGE_DATA].tobytes()
    pictures = [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    tensors = {k: v for k, v in batch.tensors.items() if k not in (IMAGE_DATA, "image_bytes")}
    if pictures:
        units = np.array(processor.units(pictures), np.int32)
        tensors["image_units"] = FlatTensor("I32", "image", units)
        for key, value in processor.pixels(pictures).items():
            dtype, array = as_array(value)
            tensors[key] = FlatTensor(dtype, "unit" if key == "pixel_values" else "image", array)
    return replace(batch, tensors=tensors)


def check_images(file: str, arrays: Mapping[str, np.ndarray], entry: BatchEntry) -> None:
    """Raise DamagedRecord unless counts and sizes of pictures fit the tensors of a batch."""
    totals = {"image_count": entry.length("image"), "image_units": entry.length("unit")}
    for key, expected in totals.items():
        if key in arrays and (found := int(arrays[key].sum(dtype=np.int64))) != expected:
            raise DamagedRecord(file, f"counts {found} where {expected} are", key)
    sizes = arrays.get("image_bytes", np.ones(1, np.int64)).astype(np.int64)
    if (sizes == 0).any() or int(sizes.sum()) > LARGEST_PICTURES:
        raise DamagedRecord(
            file, f"has pictures without bytes, or more than {LARGEST_PICTURES} bytes", "image_bytes"
        )


def read_picture(storage: Storage, name: str, size_bytes: int) -> bytes:
    """Read a picture. Raises DamagedRecord unless size and sha256 are right."""
    file = picture_file(name)
    data = bytes(storage.read(file, 0, size_bytes + 1))
    if len(data) != size_bytes:
        found = storage.size(file)
        what = "is missing" if found is None else f"has {found} bytes, {size_bytes} expected"
        raise DamagedRecord(file, what)
    if hashlib.sha256(data).hexdigest() != name:
        raise DamagedRecord(file, "bytes do not match their sha256, which is the name of the file")
    return data
