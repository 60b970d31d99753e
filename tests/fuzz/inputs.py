"""Inputs of the fuzz targets: a valid set of files, and a list of edits.

A base is made by the code that writes such files, so it follows the format. Edits are plain JSON:
small, readable in the corpus, and minimised by leaving some out. Bytes are text in latin-1.
"""

import contextlib
import copy
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgpack

from recorder.documents import CHECKSUM_MEMBER, CHECKSUM_MEMBER_BYTES, checksum

Files = dict[str, bytes]
Edit = list[Any]
# Replaced in serialised JSON: deeper than json.dumps can nest, wider than an edit may be long.
NESTED = re.compile(r'"@nested (\d+)"')
REPEATED = re.compile(r'"@repeated (\d+) ([^"]*)"')
VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 255, 2**31, -(2**31), 2**63, 2**64, 10**30, 1e308, 0.5, -0.0),
    *(float("nan"), float("inf"), "", "a", "0", "-1", "NaN", "U8", "I64", "F32", "../x", "..", "/etc/passwd"),
    *("\x1b[2J\x1b]0;owned\x07", "\u202e", "\ud800", "\x00", "a/b", "=1+1", "²", "[red]", "\\[/red]", "<b>"),
    *([], {}, [[]], [0], [None], [-1, 2**40], {"float": "nan"}, {"float": "x"}, {"a": None}),
    *("@nested 3000", "@nested 100000", "@repeated 6000 9", "@repeated 300000 a"),
]
SNIPPETS = [
    *(
        "\x00",
        "\xff\xfe",
        "\n",
        "{",
        "}",
        '"',
        "[" * 3000,
        "(" * 500,
        "9" * 5000,
        "-1",
        "null",
        "NaN",
        "1e999",
    ),
    *("../", "\x1b[2J", "\xc2\xb2", "<script>", "\x80\x04\x95", "N.", "t.", "R.", "(", "]", "}", "\\", "'"),
    *("&a ", "*a"),
]


@dataclass(frozen=True)
class Input:
    """Edits of the valid files that a target makes under the name `base`."""

    base: str
    edits: list[Edit]

    def to_json(self) -> str:
        return json.dumps({"base": self.base, "edits": self.edits})

    @staticmethod
    def from_json(text: str) -> "Input":
        document = json.loads(text)
        return Input(document["base"], document["edits"])


@dataclass
class Case:
    """The files of one input, in memory; `write` puts them into a folder, with links and FIFOs."""

    files: Files
    special: list[Edit] = field(default_factory=list)
    edited: set[str] = field(default_factory=set)
    raw: set[str] = field(default_factory=set)  # of these, with bytes that nothing here wrote

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        for name, data in self.files.items():
            path = folder / name
            with contextlib.suppress(OSError, ValueError):  # a name that no file system takes
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        for kind, name, *rest in self.special:
            path = folder / name
            above = [folder.joinpath(*Path(name).parts[:depth]) for depth in range(1, len(Path(name).parts))]
            if any(place.is_symlink() or place.is_file() for place in above):
                continue  # below a link of an earlier edit is no place of this input
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            match kind:
                case "folder":
                    path.mkdir()
                case "link":
                    path.symlink_to(rest[0])
                case _:
                    os.mkfifo(path)
        return folder


# Documents in files


@dataclass(frozen=True)
class Codec:
    """The document in the bytes of a file, and back."""

    load: Callable[[bytes], Any]
    dump: Callable[[Any], bytes]


def expanded(data: bytes) -> bytes:
    """Replace the marks of deep nesting and of repetition."""
    text = data.decode("latin-1")
    text = NESTED.sub(lambda match: "[" * int(match[1]) + "]" * int(match[1]), text)
    text = REPEATED.sub(lambda match: '"' + match[2] * int(match[1]) + '"', text)
    return text.encode("latin-1")


def load_sealed(data: bytes) -> Any:
    if not CHECKSUM_MEMBER.fullmatch(data[-CHECKSUM_MEMBER_BYTES:]):
        raise ValueError("not sealed")
    return json.loads(data[:-CHECKSUM_MEMBER_BYTES] + b"\n}")


def dump_sealed(document: Any) -> bytes:
    """Serialise and seal; the checksum is that of the expanded bytes."""
    body = expanded(json.dumps(document, indent=1).encode()).removesuffix(b"\n}")
    return body + f',\n "crc32c": "{checksum(body)}"\n}}\n'.encode()


def load_lines(data: bytes) -> Any:
    lines = [json.loads(line) for line in data.decode().splitlines()]
    if len(lines) < 2:
        raise ValueError("one line")
    return lines


CODECS = [
    Codec(load_sealed, dump_sealed),
    Codec(json.loads, lambda document: expanded(json.dumps(document).encode())),
    Codec(load_lines, lambda lines: b"".join(expanded(json.dumps(line).encode()) + b"\n" for line in lines)),
]
BINARY_CODECS = {
    ".bin": Codec(partial(msgpack.unpackb, strict_map_key=False), msgpack.packb),
    ".pickle": Codec(pickle.loads, pickle.dumps),  # of our own plain data
}


def codec_of(name: str, data: bytes) -> Codec | None:
    """Return how the document in a file is read and written; None for one without."""
    for suffix, codec in BINARY_CODECS.items():
        if name.endswith(suffix):
            return codec
    for codec in CODECS:
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(codec.load(data), dict | list):
                return codec
    return None


def places(document: Any, path: tuple = ()) -> list[tuple]:
    """Return the paths of all values below the top of a document."""
    found = []
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        found.append((*path, key))
        if isinstance(value, dict | list):
            found += places(value, (*path, key))
    return found


def value_at(document: Any, path: list) -> Any:
    for key in path:
        document = document[key]
    return document


# Edits


def apply(base: Files, edits: list[Edit]) -> Case:
    """Return the files after the edits; one whose place is gone has no effect."""
    case = Case(dict(base))
    for edit in edits:
        with contextlib.suppress(
            KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError, RecursionError
        ):
            apply_one(case, *edit)
    return case


def apply_one(case: Case, kind: str, name: str, *rest: Any) -> None:
    files = case.files
    match kind:
        case "set" | "drop" | "key":
            edit_document(case, kind, name, *rest)
            return
        case "bytes":
            at, removed, text = rest
            data = files[name]
            files[name] = data[:at] + text.encode("latin-1") + data[at + removed :]
        case "file":
            files[name] = rest[0].encode("latin-1")
        case "text":  # of any characters
            files[name] = rest[0].encode("utf-8", "surrogatepass")
        case "repeat":
            text, count, end = rest
            files[name] = (text * count + end).encode("latin-1")
        case "remove":
            del files[name]
        case "rename":
            files[rest[0]] = files.pop(name)
            case.raw.add(rest[0])
        case "copy":
            files[rest[0]] = files[name]
            case.raw.add(rest[0])
        case _:
            case.special.append([kind, name, *rest])
            return
    case.edited.add(name)
    case.raw.add(name)


def edit_document(case: Case, kind: str, name: str, path: list, value: Any = None) -> None:
    if name.endswith(".pickle") and name in case.raw:
        return  # this process must not load a pickle that has other bytes than ours
    codec = codec_of(name, case.files[name])
    if codec is None:
        return
    document = codec.load(case.files[name])
    *parents, last = path
    node = value_at(document, parents)
    if kind == "set":
        node[last] = value
    elif kind == "drop":
        del node[last]
    else:  # another name for a member
        node[value] = node.pop(last)
    case.files[name] = codec.dump(document)
    case.edited.add(name)


# Random edits


class Mutator:
    def __init__(self, bases: dict[str, Files], extra: Callable[[random.Random], Edit] | None) -> None:
        self.bases = bases
        self.extra = extra
        self.documents = {
            (base, name): codec.load(data)
            for base, files in bases.items()
            for name, data in files.items()
            if (codec := codec_of(name, data)) is not None
        }

    def input(self, chance: random.Random) -> Input:
        base = chance.choice(list(self.bases))
        return Input(base, [self.edit(chance, base) for _ in range(min(1 + int(chance.expovariate(0.9)), 6))])

    def edit(self, chance: random.Random, base: str) -> Edit:
        if self.extra is not None and chance.random() < 0.25:
            return self.extra(chance)
        files = self.bases[base]
        name = chance.choice(list(files))
        document = self.documents.get((base, name))
        if document and chance.random() < 0.8:
            return self.edit_of_document(chance, name, document)
        data = files[name]
        at = chance.randrange(len(data) + 1)
        match chance.randrange(7):
            case 0:
                return ["bytes", name, at, 0, chance.choice(SNIPPETS)]
            case 1:
                return ["bytes", name, at, chance.randrange(1, 40), ""]
            case 2 | 3:
                return ["bytes", name, at, 1, chr(chance.randrange(256))]
            case 4:
                return ["bytes", name, at, 0, data[: chance.randrange(1, 200)].decode("latin-1")]
            case 5:
                return ["bytes", name, at, len(data), ""]
            case _:
                other = chance.choice(list(files))
                return ["file", name, files[other][at : at + 4000].decode("latin-1")]

    def edit_of_document(self, chance: random.Random, name: str, document: Any) -> Edit:
        path = list(chance.choice(places(document)))
        match chance.randrange(10):
            case 0:
                return ["drop", name, path]
            case 1 if isinstance(path[-1], str):
                return ["key", name, path, chance.choice([v for v in VALUES if isinstance(v, str)])]
            case 2:
                return ["set", name, [*path, chance.choice(["x", 0, "0"])], chance.choice(VALUES)]
            case 3:  # a value from elsewhere
                other = value_at(document, list(chance.choice(places(document))))
                return ["set", name, path, copy.deepcopy(other)]
            case 4:
                return ["set", name, path, nearby(chance, value_at(document, path))]
        return ["set", name, path, chance.choice(VALUES)]


def nearby(chance: random.Random, value: Any) -> Any:
    """Return a value of the same kind, or of a kind that is easily confused with it."""
    if isinstance(value, bool | None):
        return chance.choice([not value, str(value), int(bool(value))])
    if isinstance(value, int | float):
        choices = [value + 1, value - 1, -value, value * 1000, str(value), [value], float(value)]
        return chance.choice(choices)
    if isinstance(value, str):
        return chance.choice([value + "x", value[1:], value * 2, value.upper(), [value], {value: value}])
    return chance.choice([[value], str(value)[:2000], {"0": value}, list(value), len(value)])


CODES = [
    *("(", ")", "]", "}", "t", "l", "d", "a", "e", "s", "u", "0", "2", "1", ".", "N", "R", "b", "Q"),
    *("P0\n", "\x81", "\x85", "\x86", "\x87", "\x94", "h\x00", "q\x05", "K\x01", "j\xff\xff\xff\xff"),
    *("J\xff\xff\xff\x7f", "r\xff\xff\xff\x7f", "\x8a\xff", "\x8b\xff\xff\xff\x7f", "X\xff\xff\xff\x7f"),
    *("I9999999999999\n", "F1e999\n"),
    *("\x8c\x05posix\x8c\x06system\x93", "cos\nsystem\n", "cbuiltins\neval\n", "cnumpy\ndtype\n"),
    *("ccollections\nOrderedDict\n", "ctorch._utils\n_rebuild_tensor_v2\n"),
]


def pickle_edit(chance: random.Random) -> Edit:
    return [
        "bytes",
        "data",
        chance.randrange(3000),
        chance.choice([0, 0, 1, 5]),
        chance.choice(CODES) * chance.choice([1, 1, 50]),
    ]
