"""Pictures in files of other frameworks: pickled images of Pillow, else pixels with their grids.

What can be imported of neither kind is a note, which counts the samples.
"""

import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recorder.errors import RecordError
from recorder.importers.stand_ins import Instance
from recorder.pictures.kinds import encoded

IMAGES = "images and other inputs that are not text are not imported"
NO_FILES = "the log names images whose files it does not have: they are not imported"
PIXELS = "the file has the pixels of images, not their files"
COUNTED = (IMAGES, NO_FILES)  # notes that are added once per sample
NAMES = ("images", "image")
# modes of Pillow that PNG has, with 8 bits: their channels, and PNG's colour type
MODES = {"L": (1, 0), "RGB": (3, 2), "LA": (2, 4), "RGBA": (4, 6)}


def counted(notes: Sequence[str]) -> list[str]:
    """Return each note once; of what is left out of samples with their number."""
    counts = Counter(notes)
    return [f"{note}: {counts[note]} of the samples" if note in COUNTED else note for note in counts]


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
    chunks = (struct.pack(">I", len(body)) + kind + body + crc_of(kind + body) for kind, body in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def crc_of(data: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(data))


def pixels_of(inputs: Any) -> dict[str, np.ndarray]:
    """Return the pixels of a sample; nothing if they do not say which belong to an image."""
    given: Mapping[str, Any] = inputs if isinstance(inputs, dict) else {}
    found = {name: given[name] for name in ("pixel_values", "image_grid_thw") if name in given}
    if len(found) < 2 or not all(isinstance(values, np.ndarray) for values in found.values()):
        return {}
    values, grid = found["pixel_values"], found["image_grid_thw"]
    is_grid = grid.ndim == 2 and grid.shape[1] == 3 and grid.dtype.kind in "iu" and (grid >= 0).all()
    return found if is_grid and values.ndim > 1 and grid.prod(axis=1).sum() == len(values) else {}
