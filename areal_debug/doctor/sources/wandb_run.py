"""Read the history of a Weights & Biases run from its `.wandb` file, which offline runs have, too.

The file is a log of LevelDB: blocks of 32 KiB with records in fragments, each with a checksum, a
length and a type. A record is a protobuf message, of which only the history is decoded here: the
package itself has no reader, and needs none of it to be installed. SwanLab's `backup.swanlab` is
the same with records of JSON.
"""

import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from areal_core.safety.received import read_received
from areal_debug.doctor.sources.plain_files import Row, UnreadableRun

FILE_HEADER_BYTES, BLOCK_BYTES = 7, 1 << 15
FRAGMENT = struct.Struct("<IHB")  # checksum of type and data, length, type
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
MAX_RECORD_BYTES, MAX_FILE_BYTES = 1 << 26, 1 << 32
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
HISTORY = 2  # of Record
ITEM, STEP = 1, 2  # of HistoryRecord
NUMBER = 1  # of HistoryStep
KEY, NESTED_KEY, VALUE_JSON = 1, 2, 16  # of HistoryItem


def read_wandb(file: Path, run: str = "") -> Iterable[Row]:
    """Yield what was logged, one row a call of `wandb.log` or a number. Raises UnreadableRun for damage."""
    data = read_received(file, MAX_FILE_BYTES)
    rows_of = {b":W&B": history_of, b":SWL": scalar_of}.get(data[:4])
    if rows_of is None:
        raise UnreadableRun(
            f"{file} is no run of Weights & Biases or SwanLab: it begins neither with :W&B nor :SWL"
        )
    try:
        for record in records_of(data):
            yield from rows_of(record)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UnreadableRun(f"{file} is damaged: {error}") from error


def records_of(data: bytes) -> Iterator[bytes]:
    """Yield complete records; the last one of a running or killed run may be cut off."""
    place, pieces = FILE_HEADER_BYTES, bytearray()
    while place + FRAGMENT.size <= len(data):
        rest = BLOCK_BYTES - place % BLOCK_BYTES
        if rest < FRAGMENT.size:  # padding at the end of a block
            place += rest
            continue
        checksum, size, kind = FRAGMENT.unpack_from(data, place)
        start = place + FRAGMENT.size
        if kind not in (FULL, FIRST, MIDDLE, LAST) or start + size > len(data):
            if start + size > len(data) or not any(data[place:]):
                return
            raise ValueError(f"fragment of unknown kind {kind} at byte {place}")
        content = data[start : start + size]
        if zlib.crc32(content, zlib.crc32(bytes([kind]))) != checksum:
            raise ValueError(f"wrong checksum at byte {place}")
        pieces = bytearray(content) if kind in (FULL, FIRST) else pieces + content
        if len(pieces) > MAX_RECORD_BYTES:
            raise ValueError(f"record of more than {MAX_RECORD_BYTES} bytes at byte {place}")
        if kind in (FULL, LAST):
            yield bytes(pieces)
        place = start + size


def fields_of(message: bytes) -> Iterator[tuple[int, Any]]:
    place, end = 0, len(message)
    while place < end:
        tag, place = message[place], place + 1
        if tag > 0x7F:
            tag, place = varint(message, place - 1)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value, place = varint(message, place)
            yield number, value
            continue
        if kind == BYTES and place < end and message[place] < 0x80:  # in place: most are of one byte
            size, place = message[place], place + 1
        elif kind == BYTES:
            size, place = varint(message, place)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise ValueError(f"field {number} has the unknown wire type {kind}")
        if place + size > end:
            raise ValueError(f"field {number} is longer than its message")
        yield number, message[place : place + size]
        place += size


def varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            break
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value, place
    raise ValueError("a number does not end")


def history_of(record: bytes) -> Iterator[Row]:
    yield from (row_of(value) for number, value in fields_of(record) if number == HISTORY)


def scalar_of(record: bytes) -> Iterator[Row]:
    found = parsed(record)
    if found["model_type"] == "Scalar":
        data = found["data"]
        yield {"step": data["step"], data["key"]: data["metric"]["data"]}


def row_of(history: bytes) -> dict[str, Any]:
    """Decode one HistoryRecord."""
    row: dict[str, Any] = {}
    for number, value in fields_of(history):
        if number == STEP:
            row["_step"] = dict(fields_of(value)).get(NUMBER, 0)
        elif number == ITEM:
            names, text = [], b"null"
            for field, content in fields_of(value):
                if field in (KEY, NESTED_KEY) and content:
                    names.append(content.decode())
                elif field == VALUE_JSON:
                    text = content
            row["/".join(names)] = parsed(text)
    return row


def parsed(text: bytes) -> Any:
    """Parse JSON, also with NaN and infinite numbers."""
    try:
        return msgspec.json.decode(text)
    except ValueError:
        return json.loads(text)
