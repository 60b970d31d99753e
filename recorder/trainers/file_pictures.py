"""Pictures in files of other frameworks: pickled images of Pillow, else pixels with their grids.

What can be imported of neither kind is a note, which counts the samples.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recorder.errors import RecordError
from recorder.pictures.kinds import encoded
from recorder.trainers.foreign import IMAGES, optional
from recorder.trainers.stand_ins import Instance

PIXELS = "the file has the pixels of images, not their files"
NAMES = ("images", "image")
# modes of Pillow that PNG has, with 8 bits: their channels, and PNG's colour type
MODES = {"L": (1, 0), "RGB": (3, 2), "LA": (2, 4), "RGBA": (4, 6)}


def pictures_in(inputs: Any, data: Any, notes: list[str]) -> dict[str, Any]:
    """Return `images` and `pixels` of a sample, and add a note for those that are left out.

    Args:
        inputs: what the processor made of its pictures, by name, or None.
        data: the pictures, in a list under one of `NAMES`, and other inputs; or None.
    """
    given = data if isinstance(data, dict) else {}
    found: Any = next((given[name] for name in NAMES if given.get(name) is not None), [])
    files = [file_of(value) for value in (found if isinstance(found, list) else [found])]
    has_files = bool(files) and None not in files
    pixels = pixels_of(inputs)
    has_others = any(value is not None for name, value in given.items() if name not in NAMES)
    has_inputs = isinstance(inputs, dict) and any(value is not None for value in inputs.values())
    if has_others or (not has_files and not pixels and (files or has_inputs)):
        notes.append(IMAGES)
    if pixels and not has_files:
        notes.append(PIXELS)
    return {"images": tuple(files) if has_files else (), "pixels": pixels}


def file_of(value: Any) -> bytes | None:
    """Return the file of a picture: its bytes, or PNG of a pickled image; None of anything else."""
    if isinstance(value, Instance) and value.name.startswith("PIL."):
        state = value.state if isinstance(value.state, list) else []
        return png_of(state[1], state[2], state[4]) if len(state) > 4 else None
    try:
        return encoded(value, "an image")
    except RecordError:
        return None


def png_of(mode: Any, size: Any, data: Any) -> bytes | None:
    channels, colour = MODES.get(mode, (0, 0)) if isinstance(mode, str) else (0, 0)
    is_size = isinstance(size, list) and list(map(type, size)) == [int, int] and min(size) > 0
    if not is_size or not isinstance(data, bytes) or not data:
        return None
    width, height = size
    if width * height * channels != len(data):
        return None
    lines = np.frombuffer(data, np.uint8).reshape(height, width * channels)
    raw = np.insert(lines, 0, 0, axis=1).tobytes()  # each line begins with its filter, 0: none
    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def pixels_of(inputs: Any) -> dict[str, np.ndarray]:
    """Return the pixels of a sample; nothing if they do not say which belong to an image."""
    given: Mapping[str, Any] = inputs if isinstance(inputs, dict) else {}
    found = {name: given[name] for name in ("pixel_values", "image_grid_thw") if name in given}
    if len(found) < 2 or not all(isinstance(values, np.ndarray) for values in found.values()):
        return {}
    values, grid = found["pixel_values"], found["image_grid_thw"]
    is_grid = grid.ndim == 2 and grid.shape[1] == 3 and grid.dtype.kind in "iu" and (grid >= 0).all()
    return found if is_grid and values.ndim > 1 and grid.prod(axis=1).sum() == len(values) else {}


PLACEHOLDER = 1  # type of a token of a picture


def image_inputs(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs that are not text, by name: arrays, or as they are if they are none."""
    given = optional(members, "mm_kwargs")
    if not isinstance(given, dict):
        given = {name: optional(members, name) for name in ("pixel_values", "image_grid_thw")}
        if isinstance(given["pixel_values"], bytes):  # float32, before there were `mm_kwargs`
            given["pixel_values"] = [
                "float32",
                optional(members, "pixel_values_shape"),
                given["pixel_values"],
            ]
    return {name: array_of(value) for name, value in given.items() if value is not None}


def array_of(value: Any) -> Any:
    """Return the array of (dtype, shape, bytes) or of nested lists; others as they are."""
    try:
        match value:
            case [str() as dtype, [*shape], bytes() as data]:
                return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
            case list():
                found: np.ndarray = np.asarray(value)
                return found.astype(np.float32) if found.dtype.kind == "f" else found
    except (TypeError, ValueError):  # bfloat16, or a shape that does not fit
        pass
    return value


def by_sequence(inputs: Mapping[str, Any], types: Any, bounds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the inputs of each sequence; without their grids where it is unknown whose they are.

    Args:
        types: of the tokens of all sequences, or None.
        bounds: of the sequences.
    """
    num_sequences = len(bounds) - 1
    pixels = pixels_of(inputs)
    if not pixels or num_sequences == 1:
        return [dict(inputs)] * num_sequences
    values, grid = pixels["pixel_values"], pixels["image_grid_thw"]
    ends = np.concatenate([[0], np.cumsum(grid.prod(axis=1))])  # patches before each picture, and all
    is_vision = np.asarray(types if isinstance(types, list) else []) == PLACEHOLDER
    if len(is_vision) != bounds[-1] or not is_vision.any():
        return [{"pixel_values": values}] * num_sequences
    before = np.concatenate([[0], np.cumsum(is_vision)])[list(bounds)]
    patches, rest = np.divmod(before * len(values), before[-1])
    first = np.searchsorted(ends, patches)  # picture with which each sequence begins
    if rest.any() or (ends[first] != patches).any():
        return [{"pixel_values": values}] * num_sequences
    shares = zip(first, first[1:], patches, patches[1:], strict=False)
    return [
        {"pixel_values": values[a:b], "image_grid_thw": grid[i:j]} if j > i else {} for i, j, a, b in shares
    ]
