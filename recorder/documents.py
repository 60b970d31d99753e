"""JSON of a record: checksummed on disk, parsed into annotated dataclasses.

Checksummed JSON is ordinary JSON whose last member is the crc32c of every byte before it. It covers
bytes and not parsed values, because `1e5` and `1E5` differ in one bit and parse to the same number.

    parse_as(TensorEntry, {"dtype": "F32", "offset": -5, ...}, "step.json")
        -> DamagedRecord: step.json: offset is -5, expected an integer from 0 to 4611686018427387904

The annotations are the schema: members are exactly the fields of the dataclass. An annotation is
`int` (never a bool), `float` (also an int), `str`, `bool`, `Any`, a dataclass, a TypedDict, a dict,
a tuple, a union with None, or `Annotated[T, parse]`, where `parse` returns the value or raises
`Mismatch`.
"""

import dataclasses
import json
import math
import re
import reprlib
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from itertools import repeat
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from crc32c import crc32c

from areal_core.safety.file_names import problem_of
from areal_core.safety.printable import printable
from recorder.errors import DamagedRecord, UnknownFormat

Json = Any
NON_FINITE = ({"float": "inf"}, {"float": "-inf"}, {"float": "nan"})
MAX_JSON_BYTES, MAX_JSON_VALUES, MAX_JSON_DEPTH = 1 << 26, 2_000_000, 64
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
HEX_FLOAT = re.compile(r"-?0x[01](?:\.[0-9a-f]{1,13})?p[+-][0-9]{1,4}|-?inf|nan")
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


T = TypeVar("T")
Parse = Callable[[Any], Any]
LARGEST = 2**62  # sums of two fit into 64 bits
LARGEST_STEP = 999_999_999
SHOWN = 300  # characters of a message


class Mismatch(Exception):
    """A value is not what its annotation says; `path` leads to it, innermost last."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.path: list[str] = []

    def __str__(self) -> str:
        return printable(" ".join([".".join(self.path), self.what]).strip(), SHOWN)


class UnknownMembers(Mismatch):
    """An object has members that this version does not know."""


def mismatch(expected: str, value: Any) -> Mismatch:
    """Return the error for a value; `reprlib` shows the beginning of a large one."""
    return Mismatch(f"is {reprlib.repr(value)}, expected {expected}")


def parse_as(cls: Callable[..., T], document: Any, file: str) -> T:
    """Parse a document as a dataclass; `file` is its name in errors.

    Raises:
        DamagedRecord: a member is missing, or has another type or range.
        UnknownFormat: a member is not known to this version.
    """
    try:
        return parser_of(cls)(document)
    except UnknownMembers as error:
        raise UnknownFormat(f"{file} {error}: install the version of areal-debug that wrote it") from None
    except Mismatch as error:
        raise DamagedRecord(file, str(error)) from None


@cache
def parser_of(annotation: Any) -> Parse:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return lambda value: value
    if origin is Annotated:
        return arguments[1]
    if origin in (Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        parse = parser_of(inner)
        return lambda value: None if value is None else parse(value)
    if origin is dict:
        return dict_parser(*map(parser_of, arguments))
    if origin is tuple:
        return tuple_parser(arguments)
    if dataclasses.is_dataclass(annotation) or is_typeddict(annotation):
        return members_parser(annotation)
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false", dict: "an object"}
    accepted = (float, int) if annotation is float else (annotation,)
    return of_type(accepted, names[annotation])


def of_type(accepted: tuple[type, ...], name: str) -> Parse:
    def parse(value: Any) -> Any:
        if type(value) not in accepted:
            raise mismatch(name, value)
        return value

    return parse


def one_of(*allowed: str) -> Parse:
    """Accept some texts."""

    def parse(value: Any) -> str:
        if type(value) is not str or value not in allowed:
            raise mismatch(f"one of {', '.join(allowed)}", value)
        return value

    return parse


def members_parser(cls: Any) -> Parse:
    parsers = {name: parser_of(hint) for name, hint in get_type_hints(cls, include_extras=True).items()}
    members = tuple(parsers.items())

    def parse(value: Any) -> Any:
        if type(value) is not dict:
            raise mismatch("an object", value)
        if value.keys() != parsers.keys():
            if missing := sorted(parsers.keys() - value.keys()):
                raise Mismatch(f"lacks {missing}")
            raise UnknownMembers(f"has unknown keys {reprlib.repr(sorted(value.keys() - parsers.keys()))}")
        try:
            return cls(**{name: parse_member(value[name]) for name, parse_member in members})
        except Mismatch:  # one by one: only an error needs to know its place
            return cls(**parse_each(members, value))

    return parse


def dict_parser(parse_key: Parse, parse_value: Parse) -> Parse:
    def parse(value: Any) -> Any:
        if type(value) is not dict:
            raise mismatch("an object", value)
        try:
            return dict(zip(map(parse_key, value), map(parse_value, value.values()), strict=True))
        except Mismatch:  # one by one: only an error needs to know its place
            return parse_each([(parse_key(key), parse_value) for key in value], value)

    return parse


def tuple_parser(arguments: tuple[Any, ...]) -> Parse:
    any_length = arguments[-1] is Ellipsis
    parsers = [parser_of(argument) for argument in arguments if argument is not Ellipsis]

    def parse(value: Any) -> Any:
        if type(value) not in (list, tuple) or not (any_length or len(value) == len(parsers)):
            raise mismatch("a list" if any_length else f"a list of {len(parsers)}", value)
        parsed: list[Any] = []
        try:
            if any_length:
                return tuple(map(parsers[0], value))
        except Mismatch:  # one by one: only an error needs to know its place
            pass
        try:
            for item, parse_item in zip(value, repeat(parsers[0]) if any_length else parsers, strict=False):
                parsed.append(parse_item(item))
        except Mismatch as error:
            error.path.insert(0, str(len(parsed)))
            raise
        return tuple(parsed)

    return parse


def parse_each(parsers: Iterable[tuple[str, Parse]], values: dict[str, Any]) -> dict[str, Any]:
    parsed, name = {}, ""
    try:
        for name, parse in parsers:
            parsed[name] = parse(values[name])
    except Mismatch as error:
        error.path.insert(0, name)
        raise
    return parsed


def integer(low: int, high: int = LARGEST) -> Parse:
    """Accept integers from `low` to `high`."""

    def parse(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise mismatch(f"an integer from {low} to {high}", value)
        return value

    return parse


def text(pattern: str, expected: str) -> Parse:
    """Accept texts that match a pattern completely."""
    compiled = re.compile(pattern)

    def parse(value: Any) -> str:
        if type(value) is not str or not compiled.fullmatch(value):
            raise mismatch(expected, value)
        return value

    return parse


def file_name(value: Any) -> str:
    """Accept names that are safe below any folder."""
    if reason := problem_of_name(value) if type(value) is str else problem_of(value):
        raise mismatch(f"a file name, but it {reason}", value)
    return str(value)


problem_of_name = lru_cache(maxsize=4096)(problem_of)  # all steps have files of the same names


def hex_float(value: Any) -> float:
    """Accept what Python and C's `%a` write: with trailing zeros, or without."""
    if type(value) is str and HEX_FLOAT.fullmatch(value):
        with suppress(OverflowError):
            return float.fromhex(value)
    raise mismatch("a float as C99 hex, such as 0x1.8p+1", value)


Count = Annotated[int, integer(0)]
Positive = Annotated[int, integer(1)]
Step = Annotated[int, integer(0, LARGEST_STEP)]
Checksum = Annotated[str, text("[0-9a-f]{8}", "a crc32c, eight lower-case hex digits")]
Digest = Annotated[str, text("[0-9a-f]{64}", "a sha256, 64 lower-case hex digits")]
FileName = Annotated[str, file_name]
HexFloat = Annotated[float, hex_float]
