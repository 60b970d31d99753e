"""A reader of pickles that can only make plain containers: no classes, no calls, no imports exist in it.

Flight Recorder dumps are pickles that torch writes. The opcodes that build objects are not implemented here,
so a hostile file has nothing to run; a `PUT` cannot make the memo larger than the file, which it can with the
standard library's C reader. Opcodes: https://github.com/python/cpython/blob/main/Lib/pickletools.py
"""

import struct
from typing import Any

from hangdoctor.errors import UnreadableDump

MARK = object()
SINGLETONS = {0x4E: None, 0x88: True, 0x89: False}
MAX_DEPTH_OBJECTS = 5_000_000


def read_plain_pickle(data: bytes) -> Any:
    """The dicts, lists, tuples, strings, numbers and None of a pickle. Raises `UnreadableDump` at anything
    else.
    """
    try:
        return run(data)
    except (
        IndexError,
        struct.error,
        UnicodeDecodeError,
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
    ) as error:
        raise UnreadableDump(f"not a plain pickle: {error}") from error


def run(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    at = 0
    push = stack.append
    while True:
        op = data[at]
        at += 1
        if op == 0x68:  # BINGET
            push(memo[data[at]])
            at += 1
        elif op == 0x71:  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif op == 0x58:  # BINUNICODE
            size = int.from_bytes(data[at : at + 4], "little")
            push(piece(data, at + 4, size).decode())
            at += 4 + size
        elif op == 0x8C:  # SHORT_BINUNICODE
            push(piece(data, at + 1, data[at]).decode())
            at += 1 + data[at]
        elif op == 0x4B:  # BININT1
            push(data[at])
            at += 1
        elif op == 0x4A:  # BININT
            push(struct.unpack_from("<i", data, at)[0])
            at += 4
        elif op == 0x28:
            push(MARK)
        elif op == 0x7D:
            push({})
        elif op == 0x5D:
            push([])
        elif op in SINGLETONS:
            push(SINGLETONS[op])
        elif op == 0x2E:  # STOP
            return plain(stack.pop())
        else:
            at = rare(op, data, at, stack, memo)


def rare(op: int, data: bytes, at: int, stack: list[Any], memo: dict[int, Any]) -> int:
    """One of the less frequent opcodes; returns where the next one starts."""
    if op == 0x65:  # APPENDS
        items = to_mark(stack)
        stack[-1].extend(items)
    elif op == 0x75:  # SETITEMS
        items = to_mark(stack)
        stack[-1].update(zip(items[::2], items[1::2], strict=True))
    elif op == 0x61:  # APPEND
        item = stack.pop()
        stack[-1].append(item)
    elif op == 0x73:  # SETITEM
        value, key = stack.pop(), stack.pop()
        stack[-1][key] = value
    elif op in (0x85, 0x86, 0x87):  # TUPLE1..3
        count = op - 0x84
        stack[-count:] = [tuple(plain(stack[-count:]))]
    elif op == 0x74:  # TUPLE
        items = to_mark(stack)
        stack.append(tuple(items))
    elif op == 0x29:
        stack.append(())
    elif op == 0x94:  # MEMOIZE
        memo[len(memo)] = stack[-1]
    else:
        return sized(op, data, at, stack, memo)
    return at


def sized(op: int, data: bytes, at: int, stack: list[Any], memo: dict[int, Any]) -> int:
    """Opcodes that carry an argument."""
    if op == 0x4D:  # BININT2
        stack.append(int.from_bytes(piece(data, at, 2), "little"))
        return at + 2
    if op == 0x8A:  # LONG1
        stack.append(int.from_bytes(piece(data, at + 1, data[at]), "little", signed=True))
        return at + 1 + data[at]
    if op == 0x47:  # BINFLOAT
        stack.append(struct.unpack_from(">d", data, at)[0])
        return at + 8
    if op == 0x6A:  # LONG_BINGET
        stack.append(memo[int.from_bytes(piece(data, at, 4), "little")])
        return at + 4
    if op == 0x72:  # LONG_BINPUT
        memo[int.from_bytes(piece(data, at, 4), "little")] = stack[-1]
        return at + 4
    if op == 0x80:  # PROTO
        return at + 1
    if op == 0x95:  # FRAME
        return at + 8
    raise UnreadableDump(
        f"pickle opcode 0x{op:02x} at byte {at - 1} would build an object; a Flight Recorder dump has only plain data"
    )


def piece(data: bytes, at: int, size: int) -> bytes:
    """Exactly `size` bytes, or an error: a slice alone would silently be shorter."""
    part = data[at : at + size]
    if len(part) != size:
        raise UnreadableDump(f"pickle ends inside an item of {size} bytes at byte {at}")
    return part


def to_mark(stack: list[Any]) -> list[Any]:
    items = []
    while (item := stack.pop()) is not MARK:
        items.append(item)
    return items[::-1]


def plain(value: Any) -> Any:
    """`value`, unless the mark was left where data should be."""
    if value is MARK:
        raise UnreadableDump("pickle has a mark where data should be")
    return value
