"""Which picture of a row, or which result of a tool, differs between two recordings, and where.

A picture is recorded as its file or as pixels of the model. Files are decoded only to describe a
difference, within the limits of `areal_core.data.images`.
"""

import hashlib
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from areal_core.errors import ImageError
from recorder import RecordedStep
from recorder.conversations import Conversation, Part
from recorder.pictures.kinds import kind_of


@dataclass(frozen=True)
class Seen:
    """A picture of a row: the sha256 of its file, or of its pixels, and their number of bytes.

    `units` are the entries of its pixels, None of a file.
    """

    sha256: str
    size_bytes: int
    units: int | None = None


def pictures_of(step: RecordedStep, rank: int) -> list[list[Seen]]:
    tensors = step.batch_entry(rank)[1].tensors
    if "pixel_values" not in tensors:
        return [[Seen(*named) for named in row] for row in step.pictures_of_rows(rank)]
    arrays = step.batch(rank, ["image_count", "image_units", "pixel_values"])
    found, begin = [], 0
    for units in arrays["image_units"].tolist():
        data = arrays["pixel_values"][begin : begin + units].tobytes()
        found.append(Seen(hashlib.sha256(data).hexdigest(), len(data), units))
        begin += units
    ends = np.cumsum(arrays["image_count"]).tolist()
    return [found[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def describe(
    number: int, left: Seen | None, right: Seen | None, steps: tuple[RecordedStep, RecordedStep]
) -> tuple[str | None, str | None]:
    """Return what each side has as a row's picture of this number; None where it has none.

    The right one ends with where the pixels differ, if both can be decoded.
    """
    files = [
        None if seen is None or seen.units is not None else step.picture(seen.sha256, seen.size_bytes)
        for seen, step in zip((left, right), steps, strict=True)
    ]
    region = "" if files[0] is None or files[1] is None else f"; {where_different(files[0], files[1])}"
    return text_of(number, left, files[0]), text_of(number, right, files[1], region)


def text_of(number: int, seen: Seen | None, file: bytes | None, region: str = "") -> str | None:
    """Return what is known of a picture; None if there is none."""
    if seen is None:
        return None
    what = f"{seen.units} units of pixels" if file is None else str(kind_of(file))
    return f"image {number} ({what}, {seen.size_bytes:,} bytes, sha256 {seen.sha256[:16]}{region})"


def where_different(left: bytes, right: bytes) -> str:
    from areal_core.data.images import decode  # imports Pillow, which reading a record does not need

    try:
        here, there = (np.asarray(decode(file)) for file in (left, right))
    except (ImageError, ModuleNotFoundError) as error:
        return f"pixels not compared, because {error}"
    if here.shape != there.shape:
        return "of another size in pixels"
    different = (here != there).any(axis=2)  # [height, width]
    if not different.any():
        return "the same pixels in another file"
    rows, columns = np.flatnonzero(different.any(axis=1)), np.flatnonzero(different.any(axis=0))
    return (
        f"{int(different.sum()):,} of {different.size:,} pixels differ, x {columns[0]} to {columns[-1]}, "
        f"y {rows[0]} to {rows[-1]}"
    )


AROUND = 40  # characters on each side of the first one that differs


def differing_result(left: Conversation | None, right: Conversation | None) -> tuple[str, str] | None:
    """Return what each side got from a tool, if that is the first difference of two conversations.

    None if they are equal, or the model or the agent did something else before.
    """
    if left is None or right is None:
        return None
    for one, other in zip_longest(parts_of(left), parts_of(right)):
        if one == other:
            continue
        if one is None or other is None or not one.kind == other.kind == "result" or one.name != other.name:
            return None
        first = next(
            (at for at, (a, b) in enumerate(zip(one.text, other.text, strict=False)) if a != b),
            min(len(one.text), len(other.text)),
        )
        return returned(one, first), returned(other, first)
    return None


def returned(result: Part, at: int) -> str:
    """Return what a tool returned to which call, around a character of it."""
    begin, end = max(0, at - AROUND), at + AROUND
    text = ("..." if begin else "") + result.text[begin:end] + ("..." if end < len(result.text) else "")
    return f"{result.name}({result.arguments}) returned {text!r}"


def parts_of(conversation: Conversation) -> list[Part]:
    """Return all parts of a conversation, in order, without reasoning, which templates drop."""
    parts = [part for call in conversation.calls for part in conversation.parts(call)]
    return [part for part in parts if part.kind != "reasoning"]
