"""Checksummed JSON: ordinary JSON whose last member is the crc32c of every byte before it.

The checksum covers bytes and not parsed values, because `1e5` and `1E5` differ in one bit and parse
to the same number.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from crc32c import crc32c

from recorder.errors import DamagedRecord

Json = Any
NON_FINITE = ({"float": "inf"}, {"float": "-inf"}, {"float": "nan"})
CHECKSUM_MEMBER_BYTES = len(b',\n "crc32c": "00000000"\n}\n')
CHECKSUM_MEMBER = re.compile(rb',\n "crc32c": "([0-9a-f]{8})"\n}\n')


def checksum(data: Any) -> str:
    """Return the crc32c of a contiguous buffer, as eight lower-case hex digits."""
    return f"{crc32c(data):08x}"


def plain(value: Json) -> Json:
    """Replace non-finite floats, which JSON lacks, by objects such as `{"float": "nan"}`."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def restored(value: Json) -> Json:
    """Invert `plain`; tuples have become lists."""
    if isinstance(value, dict):
        if value in NON_FINITE:
            return float(value["float"])
        return {key: restored(item) for key, item in value.items()}
    return [restored(item) for item in value] if isinstance(value, list) else value


def json_bytes(document: dict[str, Json]) -> bytes:
    """Serialize a document as JSON, one line per member; floats read back to the same bits."""
    # without `indent`, which selects an encoder that is ten times slower
    members = [f" {json.dumps(str(key))}: {json_text(value)}" for key, value in document.items()]
    return ("{\n" + ",\n".join(members) + "\n}\n").encode()


def json_text(value: Json) -> str:
    """Serialize a value, which may contain dataclasses, as JSON on one line."""
    try:
        return json.dumps(value, allow_nan=False, default=vars)
    except ValueError:
        return json.dumps(plain(value), allow_nan=False, default=vars)


def checksummed_bytes(document: dict[str, Json]) -> bytes:
    """Serialize a non-empty document as checksummed JSON."""
    body = json_bytes(document)[: -len("\n}\n")]
    return body + f',\n "crc32c": "{checksum(body)}"\n}}\n'.encode()


def parse_checksummed(data: bytes, file: str) -> dict[str, Json]:
    """Check and parse checksummed JSON, without its checksum; `file` is the name for errors.

    Raises DamagedRecord if the checksum is absent or any byte differs.
    """
    match = CHECKSUM_MEMBER.fullmatch(data[-CHECKSUM_MEMBER_BYTES:])
    if not match:
        raise DamagedRecord(
            file, f"does not end with its checksum ({len(data)} bytes): it is cut off or changed"
        )
    body = data[:-CHECKSUM_MEMBER_BYTES]
    if checksum(body) != match[1].decode():
        raise DamagedRecord(file, f"bytes do not match their crc32c {match[1].decode()}")
    return restored(json.loads(body + b"\n}"))
