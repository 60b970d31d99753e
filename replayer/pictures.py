"""Which picture of a row differs between two recordings, and where in it.

A picture is recorded as its file or as pixels of the model. Files are decoded only to describe a
difference, within the limits of `areal_core.data.images`.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from areal_core.errors import ImageError
from recorder import RecordedStep
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
    """Return the pictures of each row of a rank."""
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
