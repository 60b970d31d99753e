"""What a pattern is, and the counts below which none is claimed."""

from dataclasses import dataclass

MIN_DISTINCT = 3  # distinct values: two numbers always have a common factor, and a common difference
MIN_UNRELATED = 8  # values: fewer may differ in all of them by chance


@dataclass(frozen=True)
class Pattern:
    """How B's values follow from A's.

    `kind` is one of KINDS; `why` a phrase with the numbers; `value` the shift, factor, offset, or
    number of rows.
    """

    kind: str
    why: str
    value: float | None = None


KINDS = (
    "shifted",
    "scaled",
    "offset",
    "permuted",
    "same set, other order",
    "other support",
    "not finite",
    "rounding",
    "replaced",
    "one rank",
    "one row",
    "later rows",
    "one tensor",
    "one layer",
    "some tensors",
    "every tensor",
)


def count(number: int, noun: str) -> str:
    """Return `1 row`, `2 rows`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
