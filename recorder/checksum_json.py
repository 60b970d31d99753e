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

from areal_core.safety.printable import printable
from recorder.errors import DamagedRecord

Json = Any
NON_FINITE = ({"float": "inf"}, {"float": "-inf"}, {"float": "nan"})
MAX_JSON_BYTES, MAX_JSON_VALUES, MAX_JSON_DEPTH = 1 << 26, 2_000_000, 64
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
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


def parse_json(data: bytes | bytearray, file: str) -> Json:
    """Parse JSON from outside within limits, and invert `plain`; `file` is the name for errors.

    Tuples have become lists. A lone surrogate, which no text file can hold, becomes U+FFFD. Raises
    DamagedRecord for other text than JSON, a member that is there twice, and beyond the limits.
    """
    num_values = sum(map(data.count, (b",", b"[", b"{")))
    if len(data) > MAX_JSON_BYTES or num_values > MAX_JSON_VALUES:
        raise DamagedRecord(
            file,
            f"has {len(data)} bytes and {num_values} values, more than {MAX_JSON_BYTES} or {MAX_JSON_VALUES}",
        )
    try:
        value = json.loads(data.decode(), object_pairs_hook=restored, parse_constant=refuse_constant)
        if SURROGATE.search(data):
            text = json.dumps(value, ensure_ascii=False)
            value = json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except (ValueError, RecursionError) as error:
        raise DamagedRecord(file, f"is not JSON ({printable(str(error), 120)})") from None
    if data.count(b"[") + data.count(b"{") > MAX_JSON_DEPTH and is_deep(value):
        raise DamagedRecord(file, f"is nested more than {MAX_JSON_DEPTH} deep")
    return value


def restored(pairs: list[tuple[str, Json]]) -> Json:
    """Return the object of these members, or the float that it stands for."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a member is there twice")
    return float(value["float"]) if len(value) == 1 and value in NON_FINITE else value


def refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is no JSON number")


def is_deep(value: Json) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_JSON_DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def json_bytes(document: dict[str, Json]) -> bytes:
    """Serialize a document as JSON, one line per member; floats read back to the same bits."""
    # without `indent`, which selects an encoder that is ten times slower
    members = [f" {json.dumps(str(key))}: {json_text(value)}" for key, value in document.items()]
    return ("{\n" + ",\n".join(members) + "\n}\n").encode()


def json_text(value: Json) -> str:
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
    return parse_document(body + b"\n}", file)


def parse_document(data: bytes | bytearray, file: str) -> dict[str, Json]:
    """Parse JSON that is an object. Raises DamagedRecord."""
    document = parse_json(data, file)
    if not isinstance(document, dict):
        raise DamagedRecord(file, f"is {printable(repr(document), 60)}, expected an object")
    return document
