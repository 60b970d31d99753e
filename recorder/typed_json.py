"""Parse JSON values into annotated dataclasses: the annotations are the schema.

    parse_as(TensorEntry, {"dtype": "F32", "offset": -5, ...}, "step.json")
        -> DamagedRecord: step.json: offset is -5, expected an integer from 0 to 4611686018427387904

Members are exactly the fields of the dataclass. An annotation is `int` (never a bool), `float`
(also an int), `str`, `bool`, `Any`, a dataclass, a TypedDict, a dict, a tuple, a union with None,
or `Annotated[T, parse]`, where `parse` returns the value or raises `Mismatch`.
"""

import dataclasses
import math
import re
import reprlib
import types
from collections.abc import Callable, Iterable
from functools import cache
from itertools import repeat
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from areal_core.safety.file_names import problem_of
from areal_core.safety.printable import printable
from recorder.errors import DamagedRecord, UnknownFormat

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

    def parse(value: Any) -> Any:
        if type(value) is not dict:
            raise mismatch("an object", value)
        if value.keys() != parsers.keys():
            if missing := sorted(parsers.keys() - value.keys()):
                raise Mismatch(f"lacks {missing}")
            raise UnknownMembers(f"has unknown keys {reprlib.repr(sorted(value.keys() - parsers.keys()))}")
        return cls(**parse_each(parsers.items(), value))

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
    if reason := problem_of(value):
        raise mismatch(f"a file name, but it {reason}", value)
    return str(value)


def hex_float(value: Any) -> float:
    try:
        number = float.fromhex(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if type(value) is not str or number.hex() != value:
        raise mismatch("a float as C99 hex", value)
    return number


Count = Annotated[int, integer(0)]
Positive = Annotated[int, integer(1)]
Step = Annotated[int, integer(0, LARGEST_STEP)]
Checksum = Annotated[str, text("[0-9a-f]{8}", "a crc32c, eight lower-case hex digits")]
Digest = Annotated[str, text("[0-9a-f]{64}", "a sha256, 64 lower-case hex digits")]
FileName = Annotated[str, file_name]
HexFloat = Annotated[float, hex_float]
