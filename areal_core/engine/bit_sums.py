"""Sums of the bits of a tensor, from which one wrong element and its wrong bit are located.

The bits are integers in rows and columns. Three sums, modulo 2^64, are kept: of the integers, of
each times its row, and of each times its column. They do not depend on an order, so equal tensors
have equal sums on every device. Where one element differs by d, they differ by d, row * d and
column * d (Huang and Abraham, "Algorithm-Based Fault Tolerance for Matrix Operations", 1984): its
place follows from 24 bytes a tensor, of elements of at most 4 bytes. Imports no torch:
`observe_bits.py` computes them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WORD = 1 << 64
SMALLEST = 1 << 4  # of a difference that is located: below, rounding of several elements looks alike


@dataclass(frozen=True)
class Sums:
    """The sums of a tensor of `shape`, and what it is. Equal sums: equal bits."""

    place: str
    shape: tuple[int, ...]
    total: int
    by_row: int
    by_column: int

    @property
    def numbers(self) -> tuple[int, int, int]:
        """The three sums."""
        return self.total, self.by_row, self.by_column

    def document(self) -> list[Any]:
        """Return JSON types; numbers of 64 bits as text, which no reader rounds."""
        return [self.place, list(self.shape), " ".join(map(str, self.numbers))]


def parse_sums(document: Sequence[Any]) -> Sums:
    """Parse what `Sums.document` returned."""
    place, shape, numbers = document
    total, by_row, by_column = map(int, numbers.split())
    return Sums(place, tuple(shape), total, by_row, by_column)


@dataclass(frozen=True)
class Element:
    """The one element in which two tensors differ; `bit`, None if more than one differs."""

    index: tuple[int, ...]
    bit: int | None


def locate(one: Sums, other: Sums) -> Element | None:
    """Return the element in which two tensors differ, None if not one does, or only by rounding."""
    total, by_row, by_column = (signed(a - b) for a, b in zip(one.numbers, other.numbers, strict=True))
    if one.shape != other.shape or not one.shape or abs(total) < SMALLEST:
        return None
    if by_row % total or by_column % total:
        return None
    row, column = by_row // total, by_column // total
    *leading, width = one.shape
    if not (0 <= row < math.prod(leading) and 0 <= column < width):
        return None
    index = [column]
    for size in reversed(leading):
        row, position = divmod(row, size)
        index.insert(0, position)
    size = abs(total)
    return Element(tuple(index), size.bit_length() - 1 if size & (size - 1) == 0 else None)


def signed(number: int) -> int:
    """Return the number modulo 2^64 that is nearest to 0."""
    return (number + WORD // 2) % WORD - WORD // 2
