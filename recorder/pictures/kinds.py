"""What a picture is, from its first bytes: format and size; nothing is decoded.

Only formats of pixels have a name here. Others, such as SVG, which may have scripts and links, are
kept as bytes and never shown.
"""

import io
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recorder.errors import RecordError
from recorder.format import LARGEST_PICTURE

MAX_SHOWN_PIXELS = 8192 * 8192  # a browser would need 256 MB for more
JPEG_FRAMES = {0xC0 + n for n in range(16)} - {0xC4, 0xC8, 0xCC}  # markers followed by the size


@dataclass(frozen=True)
class Kind:
    """The format of a picture, and its size in pixels; None if its header is not complete."""

    format: str
    width: int | None
    height: int | None

    @property
    def is_shown(self) -> bool:
        """Whether a page may show it: its size is known, and a browser has room for it."""
        return self.width is not None and 0 < self.width * (self.height or 0) <= MAX_SHOWN_PIXELS

    def __str__(self) -> str:
        size = "size unknown" if self.width is None else f"{self.width} x {self.height}"
        return f"{self.format}, {size}"


UNKNOWN = Kind("unknown format", None, None)


def kind_of(data: bytes) -> Kind:
    """Return the format and size that the header of a picture has."""
    formats = (
        ("PNG", b"\x89PNG\r\n\x1a\n", 0, lambda data: struct.unpack_from(">II", data, 16)),
        ("JPEG", b"\xff\xd8\xff", 0, jpeg_size),
        ("GIF", b"GIF8", 0, lambda data: struct.unpack_from("<HH", data, 6)),
        ("WEBP", b"WEBP", 8, webp_size),
        ("BMP", b"BM", 0, bmp_size),
    )
    for name, magic, offset, size_of in formats:
        if data[offset : offset + len(magic)] == magic:
            try:
                width, height = size_of(data)
            except (struct.error, IndexError, ValueError):
                return Kind(name, None, None)
            return Kind(name, width, height)
    return UNKNOWN


def bmp_size(data: bytes) -> tuple[int, ...]:
    """Return width and height of a BMP file; rows from the top have a negative height."""
    width, height = struct.unpack_from("<ii", data, 18)
    return abs(width), abs(height)


def jpeg_size(data: bytes) -> tuple[int, ...]:
    """Return width and height of a JPEG file: those of its first frame. Raises ValueError."""
    offset = 2
    while data[offset] == 0xFF:
        marker = data[offset + 1]
        if marker in JPEG_FRAMES:
            height, width = struct.unpack_from(">HH", data, offset + 5)
            return width, height
        if marker == 0xFF:  # a fill byte
            offset += 1
            continue
        (length,) = struct.unpack_from(">H", data, offset + 2)
        offset += 2 + length
    raise ValueError("no frame")


def webp_size(data: bytes) -> tuple[int, ...]:
    """Return width and height of a WebP file. Raises ValueError."""
    chunk = data[12:16]
    if chunk == b"VP8 ":
        return tuple(size & 0x3FFF for size in struct.unpack_from("<HH", data, 26))
    if chunk == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if chunk == b"VP8X" and len(data) >= 30:
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    raise ValueError("no size")


def encoded(value: Any, where: str) -> bytes:
    """Return the file of a picture: its bytes, those of `datasets`' dict, or a PIL image as PNG.

    Raises RecordError, which names `where`, for anything else, and for more than `LARGEST_PICTURE`.
    """
    data = value["bytes"] if isinstance(value, Mapping) and "bytes" in value else value
    if type(data).__module__.startswith("PIL.") and hasattr(data, "save"):
        file = io.BytesIO()
        data.save(file, format="PNG")
        data = file.getvalue()
    if not isinstance(data, bytes) or not 0 < len(data) <= LARGEST_PICTURE:
        found = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
        raise RecordError(
            f"{where} is {found}: give the bytes of its file, at most {LARGEST_PICTURE}, or a PIL image"
        )
    return data
