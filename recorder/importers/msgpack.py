"""Parse MessagePack (github.com/msgpack/msgpack, spec.md), without extension types."""

import struct
from typing import Any

from recorder.errors import ForeignFormat, UnfinishedFile

# type byte -> struct format of the value after it
FIXED = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
# type byte -> kind of value after it, and the number of bytes of its length
SIZED = {
    0xC4: ("bytes", 1),
    0xC5: ("bytes", 2),
    0xC6: ("bytes", 4),
    0xD9: ("text", 1),
    0xDA: ("text", 2),
    0xDB: ("text", 4),
    0xDC: ("list", 2),
    0xDD: ("list", 4),
    0xDE: ("dict", 2),
    0xDF: ("dict", 4),
}


def unpack(data: bytes, name: str) -> Any:
    """Parse the one value of a file.

    Raises UnfinishedFile if the data is cut off, and ForeignFormat if it continues, or has an
    extension type.
    """
    try:
        value, end = read_value(data, 0)
    except (IndexError, struct.error):
        end = len(data) + 1
    except (UnicodeDecodeError, RecursionError, ForeignFormat) as error:
        raise ForeignFormat(f"{name} is not MessagePack that can be read: {error}") from None
    if end > len(data):
        raise UnfinishedFile(f"{name} is cut off")
    if end < len(data):
        raise ForeignFormat(f"{name} continues for {len(data) - end} bytes after its MessagePack value")
    return value


def read_value(data: bytes, at: int) -> tuple[Any, int]:
    kind = data[at]
    at += 1
    if kind <= 0x7F:
        return kind, at
    if kind >= 0xE0:
        return kind - 0x100, at
    if kind in FIXED:
        size = struct.calcsize(FIXED[kind])
        return struct.unpack_from(FIXED[kind], data, at)[0], at + size
    if kind in CONSTANTS:
        return CONSTANTS[kind], at
    if kind <= 0x8F:
        return read_sized("dict", kind & 0x0F, data, at)
    if kind <= 0x9F:
        return read_sized("list", kind & 0x0F, data, at)
    if kind <= 0xBF:
        return read_sized("text", kind & 0x1F, data, at)
    if kind not in SIZED:
        raise ForeignFormat(f"it has an extension type (0x{kind:02x})")
    name, width = SIZED[kind]
    return read_sized(name, int.from_bytes(data[at : at + width], "big"), data, at + width)


def read_sized(kind: str, size: int, data: bytes, at: int) -> tuple[Any, int]:
    if kind in ("bytes", "text"):
        if at + size > len(data):
            raise IndexError(f"{size} bytes expected, {len(data) - at} left")
        content = data[at : at + size]
        return (content if kind == "bytes" else content.decode()), at + size
    values = []
    for _ in range(size if kind == "list" else 2 * size):
        value, at = read_value(data, at)
        values.append(value)
    return (values if kind == "list" else dict(zip(values[::2], values[1::2], strict=True))), at
