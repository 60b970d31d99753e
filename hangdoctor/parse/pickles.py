"""A pickle reader that can only build plain containers: it has no classes, no calls, no imports.

Flight Recorder dumps are pickles that torch writes. The opcodes that build objects are not
implemented here, so a hostile file has nothing to run; a `PUT` cannot make the memo larger than the
file, which it can with the standard library's C reader. Opcodes:
https://github.com/python/cpython/blob/main/Lib/pickletools.py
"""

import struct
from typing import Any

from hangdoctor.errors import UnreadableDump

SINGLETONS = {0x4E: None, 0x88: True, 0x89: False}


def read_plain_pickle(data: bytes) -> Any:
    """Return the dicts, lists, tuples, strings, numbers and None of a pickle. Raises
    `UnreadableDump` at anything else.
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
    """Execute the opcodes of Flight Recorder dumps, most frequent first; the others are in `rare`
    and `sized`.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    at = 0
    push = stack.append
    while True:
        op = data[at]
        at += 1
        if op == 0x68:  # BINGET
            push(memo[data[at]])
            at += 1
        elif op == 0x6A:  # LONG_BINGET
            push(memo[int.from_bytes(data[at : at + 4], "little")])
            at += 4
        elif op == 0x72:  # LONG_BINPUT
            memo[int.from_bytes(data[at : at + 4], "little")] = stack[-1]
            at += 4
        elif op == 0x71:  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif op == 0x4B:  # BININT1
            push(data[at])
            at += 1
        elif op == 0x28:  # MARK
            marks.append(len(stack))
        elif op == 0x5D:
            push([])
        elif op == 0x61:  # APPEND
            item = stack.pop()
            stack[-1].append(item)
        elif op == 0x65:  # APPENDS
            items = since_mark(stack, marks)
            stack[-1].extend(items)
        elif op == 0x75:  # SETITEMS
            items = since_mark(stack, marks)
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif op in SINGLETONS:
            push(SINGLETONS[op])
        elif op == 0x58:  # BINUNICODE
            size = int.from_bytes(data[at : at + 4], "little")
            push(piece(data, at + 4, size).decode())
            at += 4 + size
        elif op == 0x2E:  # STOP
            return stack.pop()
        else:
            at = rare(op, data, at, stack, marks, memo)


def since_mark(stack: list[Any], marks: list[int]) -> list[Any]:
    start = marks.pop()
    items = stack[start:]
    del stack[start:]
    return items


def rare(op: int, data: bytes, at: int, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> int:
    """Execute one of the less frequent opcodes; return where the next one starts."""
    if op == 0x7D:
        stack.append({})
    elif op == 0x73:  # SETITEM
        value, key = stack.pop(), stack.pop()
        stack[-1][key] = value
    elif op in (0x85, 0x86, 0x87):  # TUPLE1..3
        count = op - 0x84
        if len(stack) < count:
            raise UnreadableDump(f"pickle builds a tuple of {count} from {len(stack)} items")
        stack[-count:] = [tuple(stack[-count:])]
    elif op == 0x74:  # TUPLE
        stack.append(tuple(since_mark(stack, marks)))
    elif op == 0x29:
        stack.append(())
    elif op == 0x94:  # MEMOIZE
        memo[len(memo)] = stack[-1]
    else:
        return sized(op, data, at, stack)
    return at


def sized(op: int, data: bytes, at: int, stack: list[Any]) -> int:
    """Execute an opcode that carries an argument; return where the next one starts."""
    if op == 0x8C:  # SHORT_BINUNICODE
        stack.append(piece(data, at + 1, data[at]).decode())
        return at + 1 + data[at]
    if op == 0x4A:  # BININT
        stack.append(struct.unpack_from("<i", data, at)[0])
        return at + 4
    if op == 0x4D:  # BININT2
        stack.append(int.from_bytes(piece(data, at, 2), "little"))
        return at + 2
    if op == 0x8A:  # LONG1
        stack.append(int.from_bytes(piece(data, at + 1, data[at]), "little", signed=True))
        return at + 1 + data[at]
    if op == 0x47:  # BINFLOAT
        stack.append(struct.unpack_from(">d", data, at)[0])
        return at + 8
    if op == 0x80:  # PROTO
        return at + 1
    if op == 0x95:  # FRAME
        return at + 8
    raise UnreadableDump(
        f"pickle opcode 0x{op:02x} at byte {at - 1} would build an object; a Flight Recorder dump has only plain data"
    )


def piece(data: bytes, at: int, size: int) -> bytes:
    """Return exactly `size` bytes. Raises `UnreadableDump` where a slice alone would silently be
    shorter.
    """
    part = data[at : at + size]
    if len(part) != size:
        raise UnreadableDump(f"pickle ends inside an item of {size} bytes at byte {at}")
    return part
